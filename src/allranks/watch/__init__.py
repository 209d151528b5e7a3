"""Why does the job stand still, and who stopped it? Evidence, the catalogue of causes, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.watch.watcher import Watcher

__all__ = ["make_watch"]


def make_watch() -> Watcher:
    """The watcher of one node's agent; fits allranks.run.watch_seam.Watch."""
    from allranks.watch.watcher import Watcher

    return Watcher()
