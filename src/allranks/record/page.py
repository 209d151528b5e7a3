"""What does the record of a process say? The reader of a page (writer.py writes it, values.py is the result).

Reading needs nothing from the process: it may be stopped, dead, or hold its GIL in C. No torch here.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from allranks.record import layout as at
from allranks.record.parsing import NotARecord, Words, marks_of
from allranks.record.values import (
    Check,
    Collective,
    Exit,
    ExitKind,
    Glance,
    LastWords,
    Loader,
    Model,
    NotFinite,
    Phase,
    Record,
    Role,
    TimedStep,
    Times,
)

__all__ = [
    "Check",
    "Collective",
    "Exit",
    "ExitKind",
    "Glance",
    "LastWords",
    "Loader",
    "Model",
    "NotARecord",
    "NotFinite",
    "PageReader",
    "Phase",
    "Record",
    "Role",
    "TimedStep",
    "Times",
    "ask",
    "parse",
    "read_page",
    "read_pages",
    "side_file",
]


class PageReader:
    """Reads one page again and again; its file stays open, so the last words can be read when it is removed.

    Raises:
        OSError: The file is not there or may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def glance(self) -> Glance:
        """The words a poll needs.

        Raises:
            NotARecord: As `read_page`.
        """
        data = os.pread(self._descriptor, _GLANCE.size, 0)
        if len(data) < _GLANCE.size:
            raise NotARecord(f"{self.path} is cut short")
        w = _GLANCE.unpack(data)
        if w[at.W_MAGIC] != at.MAGIC or w[at.W_VERSION] != at.VERSION:
            raise NotARecord(f"{self.path} is no record page of version {at.VERSION}")
        return Glance(
            ticks=w[at.W_TICKS],
            tick_ns=w[at.W_TICK_NS],
            answered=w[at.W_ANSWERED],
            marks=marks_of(w),
            phase=_PHASES[w[at.W_PHASE] & 0xFF],
            phase_since_ns=w[at.W_SINCE_NS],
            step=w[at.W_STEP],
            micro_step=w[at.W_MICRO_STEP],
            epoch=w[at.W_EPOCH],
            issued=w[at.W_ISSUED],
            group_seq=max(w[at.W_GROUP_SEQ], w[at.W_STEP_SEQ]),
            group_seq_at_step=w[at.W_STEP_SEQ],
            exit_kind=_EXIT_KINDS[w[at.W_EXIT_KIND]],
            rank=w[at.W_RANK],
        )

    def beat(self) -> tuple[bytes, bool]:
        """Bytes that are others after each mark, and whether the script has not ended: all that most looks need."""
        data = os.pread(self._descriptor, 8 * (at.W_EXIT_KIND + 1 - at.W_SINCE_NS), 8 * at.W_SINCE_NS)
        return data[:-8], data[-8:] == b"\0" * 8

    def read(self, *, timed_after: int = 0) -> Record:
        """The whole record; of the moments of timed steps those after step `timed_after`.

        Raises:
            NotARecord: As `read_page`.
        """
        data = os.pread(self._descriptor, at.PAGE_BYTES, 0)
        for _ in range(4):
            again = os.pread(self._descriptor, at.PAGE_BYTES, 0)
            if _is_same(data, again):
                break
            data = again
        return parse(data, self.path, timed_after=timed_after)

    def follow(self) -> bool:
        """Whether another page has its name by now (the process has put itself in its own place, os.exec): that is read from then on."""
        try:
            now, own = Path(self.path).stat(), os.fstat(self._descriptor)
            if (now.st_ino, now.st_dev) == (own.st_ino, own.st_dev):
                return False
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False  # removed: the last words of the one before are still there
        os.close(self._descriptor)
        self._descriptor = descriptor
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> PageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_page(path: str | os.PathLike[str]) -> Record:
    """The record in `path`, consistent; does not block.

    Raises:
        NotARecord: The file is no page, is not yet filled, or of another version.
        OSError: The file is gone or may not be read.
    """
    with PageReader(path) as reader:
        return reader.read()


def parse(data: bytes, path: str, *, timed_after: int = 0) -> Record:
    """The record in the bytes of a page that was at `path`.

    Raises:
        NotARecord: As `read_page`.
    """
    return Words(data).record(path, timed_after)


def read_pages(folder: str | os.PathLike[str]) -> list[Record]:
    """The records of all processes of `folder`, by pid; files that are no page are left out."""
    records = []
    for path in sorted(Path(folder).glob(f"*{at.SUFFIX}")):
        try:
            records.append(read_page(path))
        except (OSError, NotARecord):
            continue
    return sorted(records, key=lambda record: record.pid)


def ask(path: str | os.PathLike[str]) -> int:
    """Ask the process for its flight-recorder entries.

    It writes `<pid>.fr.json` and then sets `answered` to at least the number returned here. It needs its GIL
    for that: give it 0.3 s, then go on without.
    """
    with Path(path).open("r+b", buffering=0) as file:
        file.seek(8 * at.W_ASK)
        number = struct.unpack("q", file.read(8))[0] + 1
        file.seek(8 * at.W_ASK)
        file.write(struct.pack("q", number))
    return number


def side_file(record: Record, suffix: str) -> Path:
    """The file beside the page: ".stack", ".fr.json", ".models.jsonl"."""
    return Path(record.path).with_suffix(suffix)


_GLANCE = struct.Struct("40q")
_PHASES = {phase.value: phase for phase in Phase}
_EXIT_KINDS = tuple(ExitKind)


def _is_same(one: bytes, other: bytes) -> bool:
    # Since when, phase, line, step and micro-step are equal in two copies: no mark fell into the first.
    low, high = 8 * at.W_SINCE_NS, 8 * (at.W_MICRO_STEP + 1)
    return one[low:high] == other[low:high]
