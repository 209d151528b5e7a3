"""What is a report made of? The facts of the directory, the times of one attempt, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from allranks.core.errors import UsageError
from allranks.perf.breakdown import Breakdown, RankParts, over_time
from allranks.perf.causes import Cause, find_causes
from allranks.perf.history import NoHistory, read_history
from allranks.perf.remarks import find_remarks
from allranks.perf.straggler import Straggler
from allranks.perf.values import History
from allranks.perf.view import View
from allranks.record.rundir import RunDir
from allranks.report import facts as facts_of
from allranks.report.facts import Facts

PIECES = 60
"""Columns of the heat map."""


@dataclass(frozen=True)
class Times:
    """Where the time of one attempt went."""

    history: History
    parts: Breakdown
    straggler: Straggler | None = None
    causes: tuple[Cause, ...] = ()
    """What makes it slow, the dearest first."""
    remarks: tuple[Cause, ...] = ()
    """Numbers to doubt: nothing that stops a run, or costs time."""

    @cached_property
    def pieces(self) -> dict[int, list[RankParts]]:
        """The parts over time; not asked for by the text, and of a long run half of the work."""
        return over_time(self.history, self.parts.waits, PIECES)

    @property
    def began(self) -> float:
        """Unix time of the attempt's beginning, on the first node."""
        return self.history.nodes[0].unix_s if self.history.nodes else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that is shown, in whatever form."""

    facts: Facts
    times: Times | None
    missing: tuple[str, ...] = ()
    """What cannot be said, and why."""
    pinned: tuple[int, ...] = field(default=())
    """Steps whose moments are wanted."""


def make(
    run: RunDir,
    now: float,
    *,
    trained: RunDir | None = None,
    attempt: int | None = None,
    pinned: Sequence[int] = (),
) -> Report:
    """Read the run and conclude.

    Args:
        now: Unix time.
        trained: Where metrics and checkpoints are, if the script named a directory of its own.
        attempt: 0 is the first start of the ranks; None the last.
        pinned: Steps whose moments are wanted.

    Raises:
        UsageError: AR851 there is no such attempt.
    """
    facts = facts_of.read(run, now, trained)
    times, why = _times(run.path, attempt, pinned)
    return Report(facts, times, tuple(_missing(facts, times, why)), tuple(pinned))


def _times(path: Path, attempt: int | None, pinned: Sequence[int]) -> tuple[Times | None, str]:
    try:
        history = read_history(path, attempt, pinned)
    except NoHistory as error:
        if attempt is not None:
            raise UsageError("AR851", f"no times of attempt {attempt}", why=str(error)) from error
        return None, str(error)
    if not any(rank.samples for rank in history.ranks):
        return None, "the timeline has no sample: the run ended before its first"
    view = View(history)
    causes, remarks = tuple(find_causes(view)), tuple(find_remarks(history))
    return Times(history, view.found, view.straggler, causes, remarks), ""


def _missing(facts: Facts, times: Times | None, why: str) -> list[str]:
    out = []
    if not facts.about:
        out.append(
            "no run.json: the run was not started by allranks run, so command, hosts and end are not known"
        )
    if facts.state == "running":
        out.append("the run goes on: everything here is as of now")
    if times is None:
        watched = not any(event.kind == "no-watch" for event in facts.events)
        reason = why if watched else "it ran with --no-watch"
        out.append(f"no times of steps, no heat map, no timeline: {reason}")
    else:
        out += _missing_times(times)
        if times.history.attempts > 1:
            number, last = times.history.attempt, times.history.attempts - 1
            out.append(f"times are those of attempt {number}; --attempt 0 to {last} shows the others")
    if not facts.logged.series:
        out.append("no metrics: the script did not call run.log(...) in this directory")
    if not facts.checkpoints:
        out.append("no checkpoints in this directory")
    return out


def _missing_times(times: Times) -> list[str]:
    out, history = [], times.history
    known = {rank.rank for rank in history.ranks}
    if absent := sorted(set(range(history.world_size)) - known):
        names = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
        out.append(f"no times of rank {names}: their node's file is not in this directory's timeline")
    if not times.parts.ranks:
        out.append("no breakdown of a step: no rank came to the end of two steps")
    elif len(history.ranks) > 1 and not all(rank.is_exchange_known for rank in times.parts.ranks):
        out.append(
            "of some ranks it is not known when their gradients were there: all of their backward counts as compute"
        )
    if times.parts.ranks and not history.shared_steps():
        out.append("no step has its moments recorded on all ranks: there is no timeline of a step")
    return out
