"""AR307 store-not-reachable: a rank cannot reach the rendezvous store on the first node."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR307", "store-not-reachable"

_SAYS = re.compile(
    r"client socket has (?:failed to connect|timed out)|failed to connect "
    r"to \[?|Connection refused|No route to host|Name or service not known",
    re.I,
)
_TARGET = re.compile(r"connect(?:ing)? to \[?([\w.:-]+?)\]?[:,] ?(\d+)|\(([\w.-]+), (\d+)\)")


def find(case: Case) -> Verdict | None:
    said = [
        r
        for r in case.failed
        if r.failure
        and _SAYS.search(r.failure.message)
        and r.record is not None
        and r.record.phase in ("init", "python", "import")
    ]
    if not said or (case.roots and case.roots[0] not in said):
        return None
    failure = said[0].failure
    assert failure is not None
    target = _TARGET.search(failure.message)
    named = f" {target[1] or target[3]} port {target[2] or target[4]}" if target else ""
    refused = re.search(r"refused", failure.message, re.I)
    why = (
        "refused: no process listens there"
        if refused
        else "no answer: a firewall drops it, or the host is down"
    )
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(said)} {many([r.rank for r in said], 'cannot', 'cannot')} reach the store{named} ({why})",
        said,
        where=case.frames(failure.frames),
        facts=[failure.message.split("\n")[0][:200]],
        fix="see that MASTER_ADDR is the first node's name on the network the nodes share, and open the port between them",
        can_go_on=False,
    )
