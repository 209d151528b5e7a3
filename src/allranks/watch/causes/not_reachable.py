"""AR307 store-not-reachable: a rank cannot reach the rendezvous store on the first node."""

from __future__ import annotations

import re
from collections import Counter

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.store import meeting_point
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR307", "store-not-reachable"
MIN_WAIT_S = 2.5
SLOW_NAME_S = 8.0
OPENS_S, OPENS_BUSY_S = 10.0, 60.0
"""So long may rank 0, which is there, take to open the store; the second while it still computes, as with many ranks on a core."""

_SAYS = re.compile(
    r"client socket has (?:failed to connect|timed out)|failed to connect "
    r"to \[?|Connection refused|No route to host|Name or service not known",
    re.I,
)
_TARGET = re.compile(r"connect(?:ing)? to \[?([\w.:-]+?)\]?[:,] ?(\d+)|\(([\w.-]+), (\d+)\)")
_SETTING_UP = ("init", "python", "import", "exit")


def find(case: Case) -> Verdict | None:
    said = [
        r
        for r in case.failed
        if r.failure
        and _SAYS.search(r.failure.message)
        and r.record is not None
        and r.record.phase in _SETTING_UP
        and r.record.step == 0
    ]
    if not said:
        return _waiting(case)
    if case.roots and case.roots[0] not in said:
        return None
    failure = said[0].failure
    assert failure is not None
    target = _TARGET.search(failure.message)
    named = f" {target[1] or target[3]} port {target[2] or target[4]}" if target else ""
    return _say(case, said, named, [failure.message.split("\n")[0][:200]], where=case.frames(failure.frames))


def _waiting(case: Case) -> Verdict | None:
    """All ranks there are stand in init_process_group, and some wait where nobody listens, or at another place."""
    alive = [r for r in case.evidence.ranks if r.is_alive]
    waits = [r for r in alive if (w := case.waits.get(r.rank)) is not None and w.kind == "init"]
    if not waits or len(waits) < len(alive) or case.roots:
        return None
    if (case.waited_s() or 0.0) < MIN_WAIT_S and case.evidence.trigger != "asked":
        return None
    places = {r.rank: meeting_point(r) for r in waits if meeting_point(r)}
    apart = [r for r in waits if _is_apart(r, places, case)]
    waited_s = case.waited_s() or 0.0
    is_coming = any(r.rank == 0 and _may_open(r, case) for r in waits)
    lonely = [] if is_coming else [r for r in waits if _is_lonely(r.notes.get("store", ""), waited_s)]
    found = apart or lonely
    if not found:
        return None
    facts = [f"rank {n} goes to {at}" for n, at in list(places.items())[:4]] if apart else []
    return _say(case, found, f" at {meeting_point(found[0])}", facts, where=None)


def _may_open(first: Rank, case: Case) -> bool:
    """Whether rank 0 may be on its way: it has come to the call that opens the store, and nobody listens there yet."""
    seen = first.notes.get("store", "")
    limit_s = OPENS_BUSY_S if first.state in ("R", "D") else OPENS_S
    return "refuses" in seen and "listens" not in seen and case.waits[first.rank].age_s < limit_s


def _is_lonely(seen: str, waited_s: float) -> bool:
    """Whether nobody listens where the rank wants to meet; a name may just take long on a busy host."""
    if not seen or "listens" in seen:
        return False
    return "was not resolved" not in seen or waited_s > SLOW_NAME_S


def _is_apart(rank: Rank, places: dict[int, str], case: Case) -> bool:
    """Its port is not the one the others use; names of one host may well differ."""
    ports = {n: at.rsplit(":", 1)[1] for n, at in places.items()}
    if len(set(ports.values())) < 2 or rank.rank not in ports:
        return False
    first = ports.get(0, Counter(ports.values()).most_common(1)[0][0])
    return ports[rank.rank] != first


def _say(
    case: Case, ranks: list[Rank], named: str, facts: list[str], where: tuple[str, ...] | None
) -> Verdict:
    seen = ranks[0].notes.get("store", "")
    message = ranks[0].failure.message if ranks[0].failure else ""
    if "refuses" in seen or re.search(r"refused", message, re.I):
        why = "refused: no process listens there"
    elif "not known" in seen or "not known" in message:
        why = "the name is not known"
    elif "was not resolved" in seen:
        why = "its name is not resolved: the name server does not answer"
    else:
        why = "no answer: a firewall drops it, or the host is down"
    if seen:
        facts = [*facts, f"tried from {ranks[0].host} just now: {seen}"]
    if "refuses" in seen and "listens" in seen:
        facts.append(
            "the name stands for several addresses, and the store listens on one of them only: name that address"
        )
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(ranks)} {many([r.rank for r in ranks], 'cannot', 'cannot')} reach the store{named} ({why})",
        ranks,
        where=where,
        facts=facts,
        fix="see that MASTER_ADDR is the first node's name on the network the nodes share, and open the port between them",
        can_go_on=False,
    )
