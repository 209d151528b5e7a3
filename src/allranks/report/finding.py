"""Which run is meant? A path, a name below ALLRANKS_HOME, or the newest run there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from allranks.core.errors import UsageError
from allranks.record.rundir import RunDir

MARKS = ("run.json", "events.jsonl", "metrics.jsonl", "ranks", "timeline", "diagnosis")
"""A folder with one of these was the directory of a run."""


def find(named: str, home: Path) -> RunDir:
    """The directory of the run that was asked for.

    Args:
        named: A directory, or the name of one below `home`; "" for the newest.
        home: ALLRANKS_HOME.

    Raises:
        UsageError: AR850 there is none.
    """
    if not named:
        return newest(home)
    tried = [path for path in (Path(named), home / named) if path.exists()]
    for path in tried:
        if is_run(path):
            return RunDir(path.absolute())
    near = [run.path.name for run in runs(home)][:3]
    fix = f"one of {', '.join(near)}" if near else "the directory that allranks run printed at its start"
    if tried:
        kind = "a file" if tried[0].is_file() else "a directory without " + ", ".join(MARKS[:3])
        raise UsageError("AR850", f"{tried[0]} is not the directory of a run", why=f"it is {kind}", fix=fix)
    raise UsageError("AR850", f"there is no run {named}", why=f"neither here nor below {home}", fix=fix)


def newest(home: Path) -> RunDir:
    """The run below `home` that was written to last.

    Raises:
        UsageError: AR850 there is none.
    """
    found = runs(home)
    if not found:
        why = "it holds no directory of a run" if home.is_dir() else "it does not exist"
        raise UsageError(
            "AR850",
            f"no run was given, and {home} has none",
            why=why,
            fix="allranks report RUN, with the directory that allranks run printed at its start",
        )
    return found[0]


@dataclass(frozen=True, slots=True)
class Found:
    """A run whose launcher and script may have used two directories: `allranks run` its own, start("runs/x") another."""

    launched: RunDir
    trained: RunDir
    """Where metrics and checkpoints are; often the same."""


def join(run: RunDir, home: Path) -> Found:
    """The run with its other directory, if it has one; whichever of the two `run` is."""
    if (trained := _named_by(run)) is not None:
        return Found(run, trained)
    if run.manifest.exists():
        return Found(run, run)
    beside = {known.path: known for folder in (home, run.path.parent) for known in runs(folder)}
    for known in sorted(beside.values(), key=lambda r: last_sign(r.path), reverse=True):
        if (trained := _named_by(known)) is not None and trained.path == run.path.resolve():
            return Found(known, run)
    return Found(run, run)


def _named_by(run: RunDir) -> RunDir | None:
    """The directory that the script of this run named as its own."""
    paths = [Path(str(e.fields.get("path", ""))) for e in run.read_events() if e.kind == "directory"]
    there = [path for path in paths if path.is_dir()]
    return RunDir(there[-1].resolve()) if there else None


def runs(home: Path) -> list[RunDir]:
    """Every run below `home`, the one that was written to last first."""
    try:
        there = [path for path in home.iterdir() if is_run(path)]
    except OSError:
        return []
    return [RunDir(path.absolute()) for path in sorted(there, key=last_sign, reverse=True)]


def is_run(path: Path) -> bool:
    """Whether this is the directory of a run."""
    return path.is_dir() and any((path / mark).exists() for mark in MARKS)


def last_sign(path: Path) -> float:
    """Unix time of the last write to what a run writes while it goes on; 0.0 if nothing is there."""
    files = [path / name for name in ("run.json", "events.jsonl", "metrics.jsonl")]
    for folder in ("ranks", "timeline"):
        if (path / folder).is_dir():
            files += (path / folder).iterdir()
    return max((time for file in files if (time := _modified(file))), default=0.0)


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
