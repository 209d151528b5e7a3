"""AR308 torch-versions-differ: the ranks run different versions of torch, and their communication failed."""

from __future__ import annotations

from collections import Counter

from allranks.watch.case import Case
from allranks.watch.noted import notes
from allranks.watch.verdict import Verdict, ranks_text

CODE, NAME = "AR308", "torch-versions-differ"


def find(case: Case) -> Verdict | None:
    """Only where communication broke or stands still, and nothing else explained it: different versions often work."""
    said = {r.rank: str(found[-1].get("torch")) for r in case.evidence.ranks if (found := notes(r, "meets"))}
    stands = case.victims or case.aborted or any(w.kind in ("init", "build") for w in case.waits.values())
    if len(set(said.values())) < 2 or not stands or case.roots:
        return None
    most = Counter(said.values()).most_common(1)[0][0]
    odd = [r for r in case.evidence.ranks if said.get(r.rank, most) != most]
    by_version: dict[str, list[int]] = {}
    for number, version in said.items():
        by_version.setdefault(version, []).append(number)
    told = "; ".join(f"{ranks_text(ranks)}: torch {version}" for version, ranks in by_version.items())
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(odd)} runs another version of torch than the others ({told})",
        odd,
        facts=["what ranks send each other may differ between versions"],
        fix="install the same version on all nodes; `allranks run` says at the start which differ",
        confidence="likely",
        can_go_on=False,
    )
