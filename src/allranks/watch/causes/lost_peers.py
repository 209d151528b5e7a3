"""AR266 communication-broke: ranks lost their connection or ran into the timeout, and nobody else explains it."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR266", "communication-broke"


def find(case: Case) -> Verdict | None:
    broken = case.victims or case.aborted
    if not broken:
        return None
    first = broken[0]
    message = first.failure.message.split("\n")[0] if first.failure else ""
    absent = [r for r in case.absent if r not in broken]
    if "imed out" in message and absent:
        return case.verdict(
            CODE,
            NAME,
            f"{case.who(absent)} did not come to a collective before the process "
            f"group's timeout; {ranks_text([r.rank for r in broken])} waited",
            absent,
            facts=[message[:200]],
            fix="see where the absent rank stands; raise the timeout only if it was really at work",
            can_go_on=False,
        )
    return case.verdict(
        CODE,
        NAME,
        f"communication broke on {case.who(broken)}, which {many([r.rank for r in broken], 'is', 'are')} most likely not the culprit",
        broken,
        where=case.frames(first.failure.frames) if first.failure else None,
        facts=[message[:200]],
        fix="look at the network between the hosts, and at other nodes' logs for the first error",
        confidence="possible",
        can_go_on=False,
    )
