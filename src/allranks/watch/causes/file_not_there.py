"""AR210 file-not-there-yet: a rank used a file that another rank had not made yet."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.causes.raised import failure_of
from allranks.watch.noted import notes, place
from allranks.watch.verdict import Verdict

CODE, NAME = "AR210", "file-not-there-yet"


def find(case: Case) -> Verdict | None:
    missing = [r for r in case.roots if r.notes.get("missing")]
    if not missing or case.roots[0] not in missing:
        return None
    first, failure = missing[0], failure_of(missing[0])
    others = [r for r in case.evidence.ranks if r not in missing]
    path = first.notes["missing"]
    if failure is None or not (others or first.notes.get("exists")):
        return None
    facts = [f"{failure.kind}: {failure.message.splitlines()[0] if failure.message else path}"]
    if first.notes.get("exists"):
        facts.append(
            f"{path} is there now, {first.notes['exists']} after the error: another rank made it too late"
        )
    for other in others:
        facts += [
            f"rank {other.rank} writes it at {case.at_short(place(n))}"
            for n in notes(other, "saved")
            if n.get("path") == path
        ]
    for other in others[:2]:
        if lines := case.stands_at(other):
            facts.append(f"{case.who([other])} was at {lines[0]}")
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(missing)} used {path} before another rank had made it",
        missing,
        where=case.frames(failure.frames),
        facts=facts,
        fix="put dist.barrier() on all ranks between making it and using it (or let every rank make it: os.makedirs(..., exist_ok=True))",
        confidence="certain" if first.notes.get("exists") else "likely",
        can_go_on=False,
    )
