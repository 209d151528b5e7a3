"""Does anybody listen where a rank wants to meet the others? Tried from its own host, with short deadlines."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

from allranks.watch.evidence import Rank

TRY_S = 0.2
_ADDRESS = re.compile(r"^(?:tcp://)?\[?([^\]/]+?)\]?:(\d+)$")


def with_store(rank: Rank) -> Rank:
    """A rank that waits in init_process_group, or failed there, with what was found at its meeting point."""
    meets = meeting_point(rank)
    if not meets or rank.record is None or rank.record.step or "store" in rank.notes:
        return rank
    if rank.record.phase != "init" and not (rank.failure and "client socket" in rank.failure.message):
        return rank
    return replace(rank, notes={**rank.notes, "store": look(meets)})


def meeting_point(rank: Rank) -> str:
    """'10.0.0.1:29500', as the rank noted it before it went there; empty if it meets otherwise."""
    said = [n for n in rank.record.noted if n.get("kind") == "meets"] if rank.record else []
    at = str(said[-1].get("at") or "") if said else ""
    return at.removeprefix("tcp://") if _ADDRESS.match(at) else ""


def look(address: str) -> str:
    """What happens at each address that the name stands for: '::1 refuses, 127.0.0.1 listens'."""
    found = _ADDRESS.match(address)
    if found is None or not 0 < int(found[2]) < 65536:
        return "no address"
    try:
        infos = socket.getaddrinfo(found[1], int(found[2]), type=socket.SOCK_STREAM)
    except OSError:
        return f"the name {found[1]} is not known here"
    seen = {str(info[4][0]): info for info in infos}
    return ", ".join(f"{host} {_try(info)}" for host, info in list(seen.items())[:3])


def _try(info: tuple) -> str:
    family, kind, protocol, _, where = info
    with socket.socket(family, kind, protocol) as one:
        one.settimeout(TRY_S)
        try:
            one.connect(where)
        except ConnectionRefusedError:
            return "refuses"
        except TimeoutError:
            return "does not answer"
        except OSError as error:
            return f"cannot be reached ({error.strerror or error})"
    return "listens"
