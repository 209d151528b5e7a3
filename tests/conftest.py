"""Which rules hold for every test? No test leaves anything behind; support/police.py has the checks."""

from __future__ import annotations

pytest_plugins = ["support.police", "support.command", "support.cluster"]
