"""AR231 rank-works-alone: one rank prepares something (download, tokenizing, evaluation) while all others wait for it."""

from __future__ import annotations

from allranks.watch.case import Case, is_going_on, stuck_at
from allranks.watch.verdict import Verdict, seconds

CODE, NAME = "AR231", "rank-works-alone"

_KINDS = ("sleep", "loop", "socket", "write", "disk", "subprocess", "pipe", "unknown")


def find(case: Case) -> Verdict | None:
    found = [
        (r, a)
        for r, a in case.doing(*_KINDS)
        if r.record is not None
        and (r.record.step == 0 or is_going_on(r))
        and r.record.phase in ("python", "start", "import", "data", "evaluate", "checkpoint")
    ]
    in_call = [w for n, w in case.waits.items() if w.kind in ("call", "build", "init")]
    if len(found) != 1 or not in_call:
        return None
    rank, doing = found[0]
    facts = [
        f"it {doing.words}; {'no step has been made yet' if not rank.record or not rank.record.step else 'it goes on'}"
    ]
    if case.evidence.limit_s is not None:
        left = case.evidence.limit_s - (case.waited_s([rank.rank]) or 0.0)
        facts.append(
            f"the process group's limit is {seconds(case.evidence.limit_s)}: {seconds(max(0.0, left))} left"
        )
    else:
        facts.append(
            "the others give up at the process group's timeout (gloo 30 min, NCCL 10 min unless set)"
        )
    return stuck_at(
        case,
        CODE,
        NAME,
        found,
        "works alone (preparation, download?) and has not come yet"
        if not rank.record or not rank.record.step
        else "works alone (evaluation, a checkpoint?) and has not come yet",
        facts=facts,
        fix="prepare before the job, or give init_process_group a timeout that is long enough: timeout=timedelta(hours=2)",
    )
