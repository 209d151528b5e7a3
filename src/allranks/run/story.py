"""What is told when a job ends badly: one story, with the rank that failed on its own, whoever was heard first.

Pure: exits in, text out. The watcher's verdict, where there is one, takes the story's place; this is what is known without it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from allranks.core.job import RankExit
from allranks.run.tracebacks import Traceback, is_consequence, last_traceback

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_RED, _DIM, _OFF = "\x1b[1;31m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Story:
    """Who ended the job, and what is said about it."""

    code: str
    text: str
    exit_code: int
    culprit: RankExit | None
    identity: str = ""
    """Equal for two failures that are the same exception at the same place; "" where there is none."""
    by_script: bool = False
    """An exception or an exit code, rather than a signal or the network."""

    def with_verdict(self, code: str, verdict: str) -> Story:
        """The story with the watcher's word, which holds the traceback too, in place of ours."""
        return replace(self, code=code, text=verdict)

    def to_json(self) -> dict[str, Any]:
        """For --json and run.json."""
        who = self.culprit
        return {
            "version": 1,
            "code": self.code,
            "text": self.text,
            "exit_code": self.exit_code,
            "rank": who.rank if who else None,
            "host": who.host if who else None,
            "signal": who.signal if who else None,
        }


@dataclass(frozen=True, slots=True)
class _Seen:
    """One failed exit with what its output says."""

    exit: RankExit
    traceback: Traceback | None
    is_consequence: bool


def tell(exits: Sequence[RankExit], world_size: int, *, color: bool = False, logs: str = "") -> Story:
    """The story of an attempt.

    Args:
        exits: All exits known, of all nodes; those the agent caused (`by_us`) are left out.
        logs: Where the ranks' output is, for the last line.
    """
    failed = sorted((_look(e) for e in exits if e.failed and not e.by_us), key=lambda s: s.exit.when)
    if not failed:
        return Story("AR205", "AR205 the job was stopped", 1, None)
    own = [s for s in failed if not s.is_consequence]
    if not own:
        return _all_victims(failed, exits, world_size, color, logs)
    culprit, *more = own
    lines = [_mark(_headline(culprit, world_size), color)]
    lines += _details(culprit)
    if more:
        same = [
            s
            for s in more
            if s.traceback and culprit.traceback and s.traceback.identity() == culprit.traceback.identity()
        ]
        others = [s for s in more if s not in same]
        if same:
            lines.append(f"  the same error on {_ranks(same)}")
        lines += [f"  also: {_headline(s, world_size)[6:]}" for s in others[:4]]
        if len(others) > 4:
            lines.append(f"  and {len(others) - 4} more ranks")
    lines += _victims(failed)
    lines += _footer(logs, _code(culprit), color)
    identity = culprit.traceback.identity() if culprit.traceback else ""
    by_script = culprit.exit.signal is None
    return Story(
        _code(culprit), "\n".join(lines), exit_code_of(culprit.exit), culprit.exit, identity, by_script
    )


def exit_code_of(exit: RankExit) -> int:
    """What the launcher gives back for it: the script's code, 128+n for a signal."""
    return 128 + exit.signal if exit.signal is not None else exit.code


def _look(exit: RankExit) -> _Seen:
    traceback = last_traceback(exit.last_lines) if exit.signal in (None, signal.SIGABRT) else None
    text = f"{traceback.type}: {traceback.message}" if traceback else "\n".join(exit.last_lines[-12:])
    spoke = traceback is not None or exit.signal == signal.SIGABRT
    return _Seen(exit, traceback, (spoke and is_consequence(text)) or exit.signal == signal.SIGPIPE)


def _code(seen: _Seen) -> str:
    if seen.exit.signal is None:
        return "AR200" if seen.traceback else "AR205"
    if seen.exit.signal == signal.SIGABRT:
        return "AR203"
    return "AR204" if seen.exit.signal in _CRASHES else "AR201"


def _headline(seen: _Seen, world_size: int) -> str:
    exit = seen.exit
    who = f"{_code(seen)} rank {exit.rank} of {world_size} on host {exit.host}"
    if exit.signal is not None:
        name = _signal_name(exit.signal)
        if exit.signal == signal.SIGKILL:
            return f"{who} was killed by {name} (signal 9)"
        if exit.signal in _CRASHES or exit.signal == signal.SIGABRT:
            return f"{who} crashed: {name} (signal {exit.signal})"
        return f"{who} was ended by {name} (signal {exit.signal})"
    if seen.traceback:
        first = seen.traceback.message.split("\n")[0]
        at = f" at {_short(seen.traceback.place)}" if seen.traceback.place else ""
        return f"{who} raised {seen.traceback.type}{': ' + first if first else ''}{at}"
    return f"{who} ended with exit code {exit.code}"


def _details(seen: _Seen) -> list[str]:
    """The traceback, or the last lines it printed."""
    if seen.traceback:
        return [f"  {line}" for line in seen.traceback.lines]
    if seen.exit.signal == signal.SIGKILL:
        return ["  why:   somebody, or the kernel when memory ran out, sent SIGKILL (dmesg | grep -i oom)"]
    said = [line for line in seen.exit.last_lines if line.strip()][-10:]
    return ["  it printed no traceback; its last lines:", *[f"  | {line}" for line in said]] if said else []


def _victims(failed: Sequence[_Seen]) -> list[str]:
    """One line for all that failed only because a peer was gone."""
    victims = [s for s in failed if s.is_consequence]
    if not victims:
        return []
    texts = {s.traceback.type if s.traceback else "abort" for s in victims}
    return [f"  {_ranks(victims)} failed in consequence ({', '.join(sorted(texts))})"]


def _all_victims(
    failed: list[_Seen], exits: Sequence[RankExit], world_size: int, color: bool, logs: str
) -> Story:
    """Nobody failed on its own: a rank that left early, or the network."""
    first = failed[0]
    left = [e for e in exits if not e.failed and e.when <= first.exit.when + 0.5]
    if left and len(left) < world_size:
        who = min(left, key=lambda e: e.when)
        text = f"AR206 rank {who.rank} of {world_size} on host {who.host} came to its end while others still needed it"
        lines = [
            _mark(text, color),
            "  why:   it ended with exit code 0; then the others lost their connection",
        ]
        lines += _victims(failed) + _footer(logs, "AR206", color)
        return Story("AR206", "\n".join(lines), exit_code_of(first.exit), who)
    lines = [_mark(_headline(first, world_size), color), *_details(first)]
    lines.append("  why:   a peer or the network was gone; no rank is known to have failed on its own")
    lines += _victims(failed[1:]) + _footer(logs, _code(first), color)
    return Story(_code(first), "\n".join(lines), exit_code_of(first.exit), first.exit)


def _footer(logs: str, code: str, color: bool) -> list[str]:
    dim, off = (_DIM, _OFF) if color else ("", "")
    out = [f"{dim}  more:  allranks explain {code}{off}"]
    return [f"{dim}  logs:  {logs}{off}", *out] if logs else out


def _mark(text: str, color: bool) -> str:
    return f"{_RED}{text}{_OFF}" if color else text


def _ranks(seen: Sequence[_Seen]) -> str:
    names = sorted(s.exit.rank for s in seen)
    shown = ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"rank{'s' * (len(names) > 1)} {shown}"


def _short(place: str) -> str:
    file, _, line = place.rpartition(":")
    return f"{file.rpartition('/')[2]}:{line}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
