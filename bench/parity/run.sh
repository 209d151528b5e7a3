#!/usr/bin/env bash
# The table of docs/same-result.md: makes an environment for the compared libraries in $1 (default /tmp/allranks-bench-parity) and runs them.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-/tmp/allranks-bench-parity}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet -c "$here/../../constraints.txt" -e "$here/../.." -r "$here/requirements.txt"
exec "$venv/bin/python" "$here/compare.py"
