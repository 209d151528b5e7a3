"""Is the job started again after a failure, and when?

Pure. Failures of the machines (a killed rank, a lost node) and of the script (an exception, an exit code) are counted apart; an
exception that comes back the same is not tried a third time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allranks.core.job import RankExit
from allranks.run import story
from allranks.run.endings import EXIT_MACHINE
from allranks.run.story import Story
from allranks.run.tracebacks import last_traceback

MAX_WAIT_S = 30.0
RANK_ENDED = frozenset(f"AR{number}" for number in range(200, 220))
"""Verdicts that a rank ended."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one attempt ended."""

    by_script: bool
    """An exception or an exit code, rather than a killed rank or a lost node."""
    identity: str = ""
    """Of an exception: "ValueError at train.py:10"."""
    step: int | None = None
    """Where the training stood, if the record knows."""


def failure_of(told: Story, exits: Iterable[RankExit], step: int | None) -> Failure:
    """The failure that a story tells. The watcher's verdict that a rank raised may come before that rank has ended, and is ended by us:
    so what the ranks said is looked at."""
    if told.culprit is None and told.exit_code != EXIT_MACHINE and told.code in RANK_ENDED:
        raised = [
            replace(exit, by_us=False, code=1, signal=None)
            for exit in exits
            if exit.failed and last_traceback(exit.last_lines) is not None
        ]
        again = story.tell(raised, len(raised))
        told = again if again.identity else told
    return Failure(told.by_script, told.identity, step)


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens next, and the sentence about it."""

    restart: bool
    wait_s: float
    said: str
    code: str = ""


def decide(failures: Sequence[Failure], max_restarts: int) -> Decision:
    """After the last of `failures`: start again or not. The number of restarts so far is len(failures) - 1."""
    used = len(failures) - 1
    script = sum(f.by_script for f in failures)
    counted = f"{script} by the script, {len(failures) - script} by the machines"
    if max_restarts == 0:
        return Decision(False, 0.0, "")
    if used >= max_restarts:
        return Decision(
            False, 0.0, f"no restart is left (--max-restarts {max_restarts}; failures: {counted})"
        )
    if _came_back(failures):
        last = failures[-1]
        step = f" at step {last.step}" if last.step is not None else ""
        said = f"AR044 the same failure twice in a row, {last.identity}{step}: another restart would end the same way"
        return Decision(False, 0.0, said, "AR044")
    wait = min(MAX_WAIT_S, 2.0 ** (_in_row(failures) - 1))
    return Decision(True, wait, f"restart {used + 1} of {max_restarts} in {wait:.0f} s (failures: {counted})")


def _in_row(failures: Sequence[Failure]) -> int:
    """How many of the last ones are of one kind, the training getting no further: each doubles the wait."""
    in_row = 1
    for before, after in zip(failures[-2::-1], failures[:0:-1], strict=True):
        if before.by_script != after.by_script or (before.step or 0) < (after.step or 0):
            break
        in_row += 1
    return in_row


def _came_back(failures: Sequence[Failure]) -> bool:
    """Whether the last two are one fault of the script. A step that went on between them means that work was done: try again."""
    if len(failures) < 2:
        return False
    a, b = failures[-2:]
    return bool(a.identity) and a == b
