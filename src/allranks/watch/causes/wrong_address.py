"""AR304 wrong-address: a rank listens on an address that the others cannot reach, or names an interface that is not there."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR304", "wrong-address"

_NO_INTERFACE = re.compile(
    r"Unable to find (?:interface|address) for:? ?([\w.:-]+)|Bootstrap : no socket interface found"
)
_NOT_REACHED = re.compile(
    r"connectFullMesh failed|Gloo connectFullMesh|failed to connect, willRetry|127\.0\.[01]\.1"
)
_WAS_THERE = re.compile(r"closed by peer|reset by peer|pair closure")


def find(case: Case) -> Verdict | None:
    others = [r for r in case.roots if not (r.failure and _NOT_REACHED.search(r.failure.message))]
    for rank in case.failed:
        text = rank.failure.message if rank.failure else ""
        named = _NO_INTERFACE.search(text)
        is_joining = rank.record is not None and rank.record.phase in ("init", "build")
        # Not where a peer was reached and went away, or failed of its own: on one host loopback is as it should be.
        reached = is_joining and not others and _NOT_REACHED.search(text) and not _WAS_THERE.search(text)
        if not named and not reached:
            continue
        if named:
            same = [r for r in case.failed if r.failure and _NO_INTERFACE.search(r.failure.message)]
            what = (
                f"{case.who(same)} {many([r.rank for r in same], 'names', 'name')} a "
                f"network interface that is not there{f' ({named[1]})' if named[1] else ''}"
            )
            fix = "set GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME to one of `ip -br addr`"
        else:
            same = [rank]
            what = f"{case.who([rank])} cannot reach its peers: most likely a host name that resolves to a loopback address (127.0.1.1)"
            fix = "set GLOO_SOCKET_IFNAME to the interface that the hosts share (`ip -br addr`), or take 127.0.1.1 out of /etc/hosts"
        return case.verdict(
            CODE,
            NAME,
            what,
            same,
            where=case.frames(rank.failure.frames) if rank.failure else None,
            facts=[text.split("\n")[0][:200]],
            fix=fix,
            confidence="certain" if named else "likely",
            can_go_on=False,
        )
    return None
