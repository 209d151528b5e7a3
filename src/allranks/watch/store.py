"""Does anybody listen where a rank wants to meet the others? Tried from its own host, on a thread, since a name may take half a minute.

An address is tried once for all ranks that go there: who asks within AGAIN_S is told what that try found.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from allranks.watch.evidence import Rank

TRY_S = 0.2
"""For one address."""
WAIT_S = 0.5
"""For the name and its addresses together."""
AGAIN_S = 2.0
_ADDRESS = re.compile(r"^(?:tcp://)?\[?([^\]/]+?)\]?:(\d+)$")


class _Look:
    """One try, on a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.began = time.monotonic()
        self._host, self._port = host, port
        self._infos: list[tuple] | None = None
        self._found = ""
        self._thread = threading.Thread(target=self._run, name="allranks-meeting-point", daemon=True)
        self._thread.start()

    @property
    def is_new(self) -> bool:
        """Whether what it finds, or found, is of now."""
        return self._thread.is_alive() or time.monotonic() - self.began < AGAIN_S

    def found(self) -> str:
        """What it has found by WAIT_S after its begin."""
        self._thread.join(max(0.0, self.began + WAIT_S - time.monotonic()))
        if not self._thread.is_alive():
            return self._found
        if self._infos is None:
            return f"the name {self._host} was not resolved in {WAIT_S} s"
        return f"{self._host} does not answer"

    def _run(self) -> None:
        try:
            infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            self._found = f"the name {self._host} is not known here"
            return
        seen = {str(info[4][0]): info for info in infos}
        self._infos = list(seen.values())[:3]
        self._found = ", ".join(f"{info[4][0]} {_try(info)}" for info in self._infos)


_looks: dict[str, _Look] = {}  # for all ranks of a node, and for its ended ranks


def begin(noted: Iterable[Sequence[Mapping[str, Any]]]) -> None:
    """Try where these ranks (the notes of each) want to meet, while other evidence is taken."""
    for notes in noted:
        _look_at(_meets(notes))


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
    return _meets(rank.record.noted) if rank.record else ""


def _meets(noted: Sequence[Mapping[str, Any]]) -> str:
    said = [n for n in noted if n.get("kind") == "meets"]
    at = str(said[-1].get("at") or "") if said else ""
    return at.removeprefix("tcp://") if _ADDRESS.match(at) else ""


def look(address: str) -> str:
    """What happens at each address that the name stands for: '::1 refuses, 127.0.0.1 listens'."""
    looking = _look_at(address)
    return looking.found() if looking is not None else "no address"


def _look_at(address: str) -> _Look | None:
    found = _ADDRESS.match(address)
    if found is None or not 0 < int(found[2]) < 65536:
        return None
    if address not in _looks or not _looks[address].is_new:
        for old in [a for a, one in _looks.items() if not one.is_new]:
            del _looks[old]
        _looks[address] = _Look(found[1], int(found[2]))
    return _looks[address]


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
