"""What stays of the launch in the run directory: run.json and events.jsonl, written by the hub's agent.

A full disk or a read-only file system costs these lines and one sentence, never the job.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from typing import Any

from allranks.record.rundir import RunDir


class Journal:
    """Writes about one run.

    Args:
        run: The directory.
        complain: Told once if it cannot be written.
    """

    def __init__(self, run: RunDir, complain: Callable[[str], None]) -> None:
        self.run, self._complain = run, complain
        self._failed = False

    def describe(self, **fields: Any) -> None:
        """Set fields of run.json."""
        self._try(lambda: self.run.describe(**fields))

    def event(self, kind: str, **fields: Any) -> None:
        """Add a line to events.jsonl."""
        self._try(lambda: self.run.append_event(kind, **fields))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._complain(
                    f"{self.run.path} cannot be written: {error.strerror or error}; the job goes on"
                )


def now_text() -> str:
    """The wall clock, as run.json has it."""
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """Of what must be the same on all nodes; torch is asked of its metadata, not imported."""
    from importlib import metadata

    import allranks

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    try:
        ours = metadata.version("allranks")
    except metadata.PackageNotFoundError:
        ours = getattr(allranks, "__version__", "unknown")
    return {"allranks": ours, "torch": torch, "python": ".".join(map(str, sys.version_info[:3]))}
