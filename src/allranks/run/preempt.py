"""How are ranks asked to save and leave before somebody takes the machine away?

By a file, `ALLRANKS_STOP_FILE`, that appears on every node; a rank looks for it at each update (one stat, about 1 us), so nothing is
communicated until it is there. Its content is {"why": "SIGTERM", "unix_time": ...}.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

from allranks.run.options import Options


def ask_to_stop(node_dir: Path, why: str) -> None:
    """Make the stop file of this node."""
    path = node_dir / "stop"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_suffix(".making")
        making.write_text(json.dumps({"why": why, "unix_time": time.time()}))
        making.replace(path)  # whole, or not there


def scheduled_stop(options: Options, env: Mapping[str, str]) -> float | None:
    """Unix time at which --stop-before strikes; None without it or without a known end."""
    end = env.get("SLURM_JOB_END_TIME", "")
    return float(end) - options.stop_before_s if options.stop_before_s is not None and end.isdigit() else None
