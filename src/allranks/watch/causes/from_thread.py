"""AR261 collective-from-thread: a collective of a side thread or hook races those of the main thread."""

from __future__ import annotations

from allranks.watch import meeting
from allranks.watch.case import Case
from allranks.watch.verdict import Verdict

CODE, NAME = "AR261", "collective-from-thread"


def find(case: Case) -> Verdict | None:
    if case.roots or not (case.differences or case.waits):
        return None
    if not case.differences and (case.absent or len(meeting.standings(case.evidence, case.waits)) < 2):
        return None
    groups = {_group(c.group) for d in case.differences for c in d.calls.values()}
    groups = groups or {_group(w.group) for w in case.waits.values()}
    for rank in case.evidence.ranks:
        calls = rank.record.calls if rank.record else ()
        side = [
            c for c in calls if c.thread and c.op not in meeting.POINT_TO_POINT and _group(c.group) in groups
        ]
        main = [c for c in calls if not c.thread and side and c.group == side[-1].group]
        if not side or not (main or _group(side[-1].group) == "default"):
            continue  # a group that only the thread uses is in no race
        call = side[-1]
        places = [f"{case.at(call.where)}   (thread {call.thread})"] if call.where else []
        places += [f"{case.at(main[-1].where)}   (main thread)"] if main and main[-1].where else []
        return case.verdict(
            CODE,
            NAME,
            f"collectives out of order: {case.who([rank])} calls {meeting.call_text(call)} "
            f"from thread {call.thread}, in a race with its main thread",
            [rank],
            where=places,
            facts=[
                "the order of calls in one process group must be the same on all ranks; two threads give no order"
            ],
            fix="give the thread a process group of its own: dist.new_group() on all ranks, and group=... in its calls",
            confidence="likely",
            can_go_on=False,
        )
    return None


def _group(name: str) -> str:
    """DDP's collectives, of which no call is known, are of the default group."""
    return name or "default"
