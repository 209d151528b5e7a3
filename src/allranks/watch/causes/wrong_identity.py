"""AR302 duplicate-rank: two processes go by the same rank, or the ranks disagree about how many they are."""

from __future__ import annotations

from collections import Counter

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.verdict import Verdict, ranks_text

CODE, NAME = "AR302", "duplicate-rank"


def find(case: Case) -> Verdict | None:
    if not any(w.kind == "init" for w in case.waits.values()) and not case.failed:
        return None
    said = {
        r.rank: (r.record.said_rank, r.record.said_world_size)
        for r in case.evidence.ranks
        if r.record and r.record.said_rank >= 0
    }
    if len(said) < 2 or len({at for r in case.evidence.ranks if r.rank in said and (at := _where(r))}) > 1:
        return None  # those who meet at different places have nothing to agree about
    twice = [n for n, count in Counter(rank for rank, _ in said.values()).items() if count > 1]
    sizes = sorted({size for _, size in said.values()})
    if sizes == [1]:
        return None  # each is a world of its own
    if twice:
        culprits = [r for r in case.evidence.ranks if said.get(r.rank, (-1, 0))[0] in twice]
        missing = sorted(set(range(case.evidence.world_size)) - {rank for rank, _ in said.values()})
        what = (
            f"{ranks_text(twice)} is there twice: "
            f"{', '.join(f'process {r.pid} on {r.host}' for r in culprits)}; missing: {ranks_text(missing)}"
        )
    elif len(sizes) > 1:
        most = Counter(size for _, size in said.values()).most_common(1)[0][0]
        culprits = [r for r in case.evidence.ranks if r.rank in said and said[r.rank][1] != most]
        what = f"the ranks disagree about the world size: {', '.join(f'rank {n} says {size}' for n, (_, size) in sorted(said.items())[:8])}"
    else:
        return None
    return case.verdict(
        CODE,
        NAME,
        what,
        culprits,
        facts=[
            "RANK and WORLD_SIZE (or what the script gave to init_process_group) must be unique and equal"
        ],
        fix="do not set rank= and world_size= in the script: the launcher sets RANK and WORLD_SIZE (LOCAL_RANK counts per node only)",
        can_go_on=False,
    )


def _where(rank: Rank) -> str:
    """The port, or the file, at which it meets the others; names of one host may differ."""
    noted = rank.record.noted if rank.record else ()
    said = [str(n.get("at") or "") for n in noted if n.get("kind") == "meets"]
    return said[-1].rsplit(":", 1)[-1] if said else ""
