"""How much do a rank's loader workers have to do? Their own records say how long they read, and how many batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from allranks.record import page


@dataclass
class Workers:
    """The loader workers of one rank, also those of passes that are over; what a worker did since the last look before it ended is lost."""

    _known: dict[int, tuple[float, int]] = field(default_factory=dict)
    _past: tuple[float, int] = (0.0, 0)

    def look(self, folder: Path | None, pids: tuple[int, ...]) -> tuple[float, int]:
        """(seconds that all of them together spent on reading, batches they read) so far."""
        for pid in set(self._known) - set(pids):
            busy, read = self._known.pop(pid)
            self._past = self._past[0] + busy, self._past[1] + read
        for pid in pids:
            found = _of(folder, pid)
            if found is not None:
                self._known[pid] = found
        busy = self._past[0] + sum(busy for busy, _ in self._known.values())
        return round(busy, 4), self._past[1] + sum(read for _, read in self._known.values())


def _of(folder: Path | None, pid: int) -> tuple[float, int] | None:
    if folder is None:
        return None
    try:
        record = page.read_page(folder / f"{pid}.page")
    except (OSError, page.NotARecord):
        return None
    if record.role != page.Role.LOADER_WORKER:
        return None
    # Only batches that are done: time and number come from one flush after each.
    is_reading = record.sample_count > 0
    return record.phase_ns[page.Phase.DATA] / 1e9, max(0, record.sample_task - is_reading)
