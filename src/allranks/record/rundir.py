"""What stays of a run, and where? The run directory.

    RUN/run.json   ranks/   diagnosis/   metrics.jsonl   events.jsonl   checkpoints/

See docs/design/architecture.md. No torch here: the agent, the views and tests read it, also of a dead run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOME = "runs"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of events.jsonl."""

    kind: str  # "start", "resume", "verdict", "checkpoint", "stop"
    unix_time: float
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run; made by `create`, or one that is there."""

    path: Path

    @property
    def manifest(self) -> Path:
        """run.json: who, what, when."""
        return self.path / "run.json"

    @property
    def events(self) -> Path:
        """events.jsonl: one line per event."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one line per run.log()."""
        return self.path / "metrics.jsonl"

    @property
    def ranks(self) -> Path:
        """ranks/: what each rank printed."""
        return self.path / "ranks"

    @property
    def diagnosis(self) -> Path:
        """diagnosis/: verdicts and their evidence."""
        return self.path / "diagnosis"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: one folder per step."""
        return self.path / "checkpoints"

    def rank_log(self, rank: int, restart: int = 0) -> Path:
        """Where rank `rank` prints after `restart` restarts."""
        return self.ranks / (f"rank{rank}.{restart}.log" if restart else f"rank{rank}.log")

    def next_diagnosis(self, code: str) -> Path:
        """The stem of the next verdict, diagnosis/002-AR251; add ".json" and ".md"."""
        self.diagnosis.mkdir(exist_ok=True)
        taken = [int(p.name[:3]) for p in self.diagnosis.glob("[0-9][0-9][0-9]-*")]
        return self.diagnosis / f"{max(taken, default=0) + 1:03d}-{code}"

    def describe(self, **fields: object) -> None:
        """Set `fields` of run.json, keep its others; a reader sees the old or the new one, never half of it."""
        text = json.dumps({**self.description(), **fields}, indent=2, default=str) + "\n"
        making = self.manifest.with_name(f".run.json.{os.getpid()}")
        making.write_text(text, encoding="utf-8")
        making.replace(self.manifest)

    def description(self) -> dict[str, object]:
        """What run.json says; empty if there is none."""
        try:
            return json.loads(self.manifest.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def append_event(self, kind: str, **fields: object) -> None:
        """Add one line to events.jsonl; lines of several processes do not mix."""
        append_line(self.events, {"time": time.time(), "event": kind, **fields})

    def read_events(self) -> list[Event]:
        """The events, oldest first; a last line that is cut short (power failure) is left out."""
        return [
            Event(str(row.pop("event", "")), float(row.pop("time", 0.0)), row)
            for row in read_lines(self.events)
        ]


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append `row` as one JSON line in one write: with O_APPEND, lines of several processes do not mix."""
    raw = (json.dumps(row, default=str) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        written = os.write(descriptor, raw)
        if written != len(raw):  # a full disk; do not add the rest later, behind another's line
            raise OSError(f"{path}: {written} of {len(raw)} bytes written, is the disk full?")
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> Iterator[dict]:
    """The JSON objects of a file of lines; lines that are none are left out, a missing file has none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def create(path: str | os.PathLike[str]) -> RunDir:
    """The run directory at `path`, made if it is not there; a run that is resumed has it already."""
    run = RunDir(Path(path).absolute())
    run.path.mkdir(parents=True, exist_ok=True)
    return run


def create_new(script: str, home: str | os.PathLike[str] = DEFAULT_HOME, now: float | None = None) -> RunDir:
    """A run directory that nobody else has, home/<script>-<date>-<time>[-k].

    Args:
        script: Path or module of the program; its last part without ".py" is the name.
        home: The folder of runs (`ALLRANKS_HOME`).
        now: Seconds since 1970, for tests.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    stem = Path(script).name.removesuffix(".py") or "run"
    base = Path(home).absolute() / f"{stem}-{stamp}"
    base.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, 10_000):
        path = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
        try:
            path.mkdir()  # the file system decides between two jobs of the same second
        except FileExistsError:
            continue
        return RunDir(path)
    raise FileExistsError(f"{base} and 9999 more are taken")
