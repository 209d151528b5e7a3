"""What does a run directory say of its run: what it was, how it ended, what was said, what was kept?

Works on a run that goes on, was killed, or was copied from another machine; what is not there is None or empty.
"""

from __future__ import annotations

import datetime
import json
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from allranks.record.rundir import Event, RunDir, read_lines
from allranks.report import finding
from allranks.report.metrics import Logged, read_series
from allranks.watch import proc
from allranks.watch.verdict import Verdict

State = Literal["running", "ended", "failed", "killed", "unknown"]

QUIET_S = 60.0
"""A run of another host that wrote something so lately is taken for one that goes on."""
TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Attempt:
    """From one start of the ranks to their end."""

    restart: int
    began: float
    """Unix time."""
    ended: float | None
    world_size: int
    code: str
    """Cause of a failed one."""


@dataclass(frozen=True, slots=True)
class Told:
    """A verdict, with when and how often it was said."""

    verdict: Verdict
    unix_time: float | None
    times: int
    page: str
    """File below RUN/diagnosis with the stacks; "" if there is none."""


@dataclass(frozen=True, slots=True)
class CheckpointFact:
    """One checkpoint that was written."""

    step: int
    folder: str
    unix_time: float | None
    size_bytes: int | None
    """None: it is no longer there, or in another place."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything but the times of the steps."""

    path: Path
    trained: Path
    """Where metrics and checkpoints are: the same, unless the script named a directory of its own."""
    about: Mapping[str, Any]
    """run.json as it is."""
    state: State
    exit_code: int | None
    why: str
    """How it ended, in words; "" where the state says it."""
    started: float | None
    """Unix time of the launcher's host, as are all times here but those of metrics and checkpoints (rank 0's host)."""
    ended: float | None
    last_sign: float | None
    attempts: tuple[Attempt, ...]
    verdicts: tuple[Told, ...]
    events: tuple[Event, ...]
    logged: Logged
    checkpoints: tuple[CheckpointFact, ...]
    tails: Mapping[int, tuple[str, ...]]
    """Last lines of the ranks that failed."""

    @property
    def name(self) -> str:
        """The script, or the directory's name where it is not known."""
        command = self.about.get("command")
        return Path(str(command[0])).name if isinstance(command, list) and command else self.path.name

    @property
    def command(self) -> str:
        """The command line that started it."""
        words = self.about.get("argv") or self.about.get("command") or []
        return "allranks " + " ".join(map(str, words)) if isinstance(words, list) and words else ""

    @property
    def world_size(self) -> int | None:
        """Ranks of the last attempt."""
        size = self.about.get("world_size")
        return size if isinstance(size, int) else None

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank."""
        nodes = self.about.get("nodes")
        found: dict[int, str] = {}
        for node in nodes if isinstance(nodes, list) else ():
            if isinstance(node, dict) and isinstance(node.get("ranks"), list):
                found |= {rank: str(node.get("host", "?")) for rank in node["ranks"] if isinstance(rank, int)}
        return found

    @property
    def wall_s(self) -> float | None:
        """From the start to the end, or to the last sign of life."""
        end = self.ended or self.last_sign
        return max(0.0, end - self.started) if self.started and end else None


def read(run: RunDir, now: float, trained: RunDir | None = None) -> Facts:
    """Everything the directory says, at unix time `now`; metrics and checkpoints from `trained`, if that is another."""
    about, events = run.description(), run.read_events()
    if trained is None or trained.path == run.path:
        trained = run
    else:
        events = sorted([*events, *trained.read_events()], key=lambda e: e.unix_time)
    about = about if isinstance(about, dict) else {}
    last = max(finding.last_sign(run.path), finding.last_sign(trained.path)) or None
    state, exit_code, why = _ending(run, about, events, last, now)
    started = _stamp(about.get("started_at")) or (events[0].unix_time if events else None)
    logged = read_series(read_lines(trained.metrics))
    return Facts(
        path=run.path,
        trained=trained.path,
        about=about,
        state=state,
        exit_code=exit_code,
        why=why,
        started=started or _first_metric(logged),
        ended=None if _is_of_before(about) else _stamp(about.get("ended_at")),
        last_sign=last,
        attempts=_attempts(events),
        verdicts=_verdicts(run, events),
        events=tuple(events),
        logged=logged,
        checkpoints=_checkpoints(trained, events),
        tails=_tails(run, about),
    )


def _ending(
    run: RunDir, about: Mapping[str, Any], events: Sequence[Event], last: float | None, now: float
) -> tuple[State, int | None, str]:
    code = about.get("exit_code")
    if isinstance(code, int) and not _is_of_before(about):
        why = next((str(e.fields.get("text", "")) for e in reversed(events) if e.kind == "stop"), "")
        return ("ended" if code == 0 else "failed"), code, why or ("" if code == 0 else exit_text(code))
    if _is_alive(run, about):
        return "running", None, ""
    if not about:
        return "unknown", None, "it was not started by allranks run, so its end is not recorded"
    if about.get("host") == socket.gethostname():
        return "killed", None, "its launcher ended without a word: killed, or the machine went down"
    if last is not None and now - last < QUIET_S:
        return "running", None, f"on {about.get('host')}: it wrote something a moment ago"
    return "unknown", None, f"no end is recorded: it goes on at {about.get('host')}, or was killed there"


def _is_of_before(about: Mapping[str, Any]) -> bool:
    """Whether the end that run.json tells is that of an earlier launch into the same directory."""
    started, ended = _stamp(about.get("started_at")), _stamp(about.get("ended_at"))
    return started is not None and ended is not None and ended < started


def exit_text(code: int) -> str:
    """'exit code 137 (SIGKILL)'."""
    if code > 128:
        try:
            return f"exit code {code} ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return f"exit code {code}"


def _is_alive(run: RunDir, about: Mapping[str, Any]) -> bool:
    """Whether the launcher of the run, which has no rank between two attempts, or a rank of it lives on this host."""
    launcher, since = about.get("launcher_pid"), about.get("launcher_started")
    is_here = about.get("host") == socket.gethostname() and bool(since)
    if is_here and isinstance(launcher, int) and proc.started(launcher) == since:
        return True
    return bool(proc.of_run(run.path))


def _attempts(events: Sequence[Event]) -> tuple[Attempt, ...]:
    out: list[Attempt] = []
    for event in events:
        if event.kind == "start":
            out.append(
                Attempt(
                    _integer(event.fields.get("restart")) or 0,
                    event.unix_time,
                    None,
                    _integer(event.fields.get("world_size")) or 0,
                    "",
                )
            )
        elif event.kind in ("end-of-attempt", "stop") and out and out[-1].ended is None:
            was = out[-1]
            code = str(event.fields.get("code", "") or "")
            # A script's own "stop" (a save asked for) has no exit code, and is not the end.
            if event.kind == "end-of-attempt" or "exit_code" in event.fields:
                out[-1] = Attempt(was.restart, was.began, event.unix_time, was.world_size, code)
    return tuple(out)


def _verdicts(run: RunDir, events: Sequence[Event]) -> tuple[Told, ...]:
    """Those of RUN/diagnosis, once each; for a run without the folder, those of the events."""
    times = {}
    for event in events:
        if event.kind == "verdict":
            times.setdefault(str(event.fields.get("code", "")), []).append(event.unix_time)
    out: list[Told] = []
    for file in sorted(run.diagnosis.glob("[0-9]*-*.json")) if run.diagnosis.is_dir() else ():
        try:
            verdict = Verdict.from_json(json.loads(file.read_text(encoding="utf-8", errors="replace")))
        except (OSError, ValueError, TypeError, AttributeError):
            continue  # half written, or of another version
        page = f"diagnosis/{file.with_suffix('.md').name}" if file.with_suffix(".md").exists() else ""
        known = next((k for k, told in enumerate(out) if told.verdict.same_as(verdict)), None)
        if known is not None:
            was = out[known]
            out[known] = Told(was.verdict, was.unix_time, was.times + 1, was.page)
        else:
            first = times.get(verdict.code)
            out.append(Told(verdict, first[0] if first else _stamp_of(file), 1, page))
    known_codes = {told.verdict.code for told in out}
    for event in events:
        code = str(event.fields.get("code", ""))
        if event.kind == "verdict" and code and code not in known_codes:
            known_codes.add(code)
            out.append(Told(_from_text(code, str(event.fields.get("text", ""))), event.unix_time, 1, ""))
    return tuple(out)


def _from_text(code: str, text: str) -> Verdict:
    """A verdict that is only kept as text: the launcher's own story of a rank that ended."""
    head, *rest = text.splitlines() or [code]
    return Verdict(code, "", head.removeprefix(code).strip(), (), quoted=tuple(line.strip() for line in rest))


def _checkpoints(run: RunDir, events: Sequence[Event]) -> tuple[CheckpointFact, ...]:
    found: dict[str, CheckpointFact] = {}
    for event in events:
        if event.kind == "checkpoint":
            folder = str(event.fields.get("folder", ""))
            step = _integer(event.fields.get("step")) or 0
            found[folder] = CheckpointFact(step, folder, event.unix_time, _size(run.checkpoints / folder))
    for path in sorted(run.checkpoints.glob("step-*")) if run.checkpoints.is_dir() else ():
        digits = re.match(r"step-(\d+)", path.name)
        if path.name not in found and digits and ".tmp-" not in path.name:
            found[path.name] = CheckpointFact(int(digits.group(1)), path.name, _stamp_of(path), _size(path))
    return tuple(sorted(found.values(), key=lambda c: (c.step, c.folder)))


def _size(folder: Path) -> int | None:
    try:
        return sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
    except OSError:
        return None


def _tails(run: RunDir, about: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    codes = about.get("exit_codes")
    failed = [int(r) for r, code in codes.items() if code and r.isdigit()] if isinstance(codes, dict) else []
    restart = _integer(about.get("restarts")) or 0
    out = {}
    for rank in sorted(failed)[:8]:
        if lines := last_lines(run.rank_log(rank, restart)):
            out[rank] = lines
    return out


def last_lines(file: Path, count: int = 12) -> tuple[str, ...]:
    """The end of a log of any size."""
    try:
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line[:400] for line in text.splitlines()[-count:])


def _first_metric(logged: Logged) -> float | None:
    times = [series.points[0].unix_time for series in logged.series.values() if series.points[0].unix_time]
    return min(times, default=None)


def _stamp(text: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None


def _stamp_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None
