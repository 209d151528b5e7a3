"""Has every rank come, once, and do all say the same world size? Asked before a process group is made, by whoever is there.

Every rank writes its name into the store. The first that finds something wrong writes the verdict, so that all end with it at once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from allranks.core.errors import StartError
from allranks.core.place import Place

logger = logging.getLogger(__name__)

_LINGER_S = 2.0  # how long rank 0 keeps the store for those who have not read the verdict


def call_roll(
    place: Place,
    store: Any,
    timeout_s: float,
    *,
    begun: float | None = None,
    serves_store: bool = False,
    say_every_s: float = 10.0,
) -> None:
    """Wait until every rank has written its name into the store; name those that have not by the deadline. Collective.

    Args:
        place: Who we are.
        store: Shared by the ranks.
        timeout_s: Seconds from `begun` on.
        begun: On time.monotonic(); now if not given.
        serves_store: The store ends with this process.
        say_every_s: How often to say who is missing.

    Raises:
        StartError: AR008 ranks are missing, AR009 two processes say they are the same rank, AR010 ranks disagree on the world size,
            AR011 rank 0 and its store went away.
    """
    try:
        _wait_for_all(place, store, timeout_s, say_every_s, time.monotonic() if begun is None else begun)
    except StartError as error:
        with contextlib.suppress(RuntimeError):  # the store may be gone, which is the error then
            _spread(store, error)
            if serves_store:
                _linger(store)
        raise
    except dist.DistNetworkError as error:
        raise StartError(
            "AR011",
            f"rank 0's store at {place.master_addr}:{place.master_port} went away while rank {place.rank} waited for the others",
            why="the process of rank 0 has ended",
            fix="read what rank 0 printed",
        ) from error


def _wait_for_all(place: Place, store: Any, timeout_s: float, say_every_s: float, begun: float) -> None:
    _sign(place, store)
    say_at = begun + say_every_s
    has_met_zero = place.rank == 0
    while store.add("arrived", 0) < place.world_size:
        if store.check(["verdict"]):
            raise StartError(**_read(store, "verdict"))
        if not has_met_zero and store.check(["here/0"]):
            has_met_zero = True
            _compare(place, _read(store, "here/0"))
        now = time.monotonic()
        if now - begun > timeout_s:
            raise _missing_error(place, store, timeout_s)
        if now > say_at:
            say_at = now + say_every_s
            missing = _names(_missing(place, store))
            logger.warning("rank %d has waited %.0f s for %s", place.rank, now - begun, missing)
        time.sleep(0.02 if now - begun < 5 else 0.25)
    if not has_met_zero:
        _compare(place, _read(store, "here/0"))


def _sign(place: Place, store: Any) -> None:
    """Write our name down; two under one rank are an error for all."""
    me = {"host": place.host, "pid": os.getpid(), "world_size": place.world_size, "torch": torch.__version__}
    store.add("came", 1)
    if store.add(f"count/{place.rank}", 1) > 1:
        other = _read(store, f"here/{place.rank}") if store.check([f"here/{place.rank}"]) else {}
        raise StartError(
            "AR009",
            f"two processes say they are rank {place.rank} of {place.world_size}: pid {me['pid']} on {place.host} and "
            f"pid {other.get('pid', '?')} on {other.get('host', '?')}",
            why="likely each node was started with local ranks as if they were ranks, or with the same --node-rank",
            fix="give each node its own --node-rank, and each process its own RANK",
        )
    store.set(f"here/{place.rank}", json.dumps(me))
    store.add("arrived", 1)


def _compare(place: Place, zero: dict[str, Any]) -> None:
    if zero["world_size"] != place.world_size:
        raise StartError(
            "AR010",
            f"rank {place.rank} on {place.host} says the world size is {place.world_size}, "
            f"rank 0 on {zero['host']} says {zero['world_size']}",
            why="likely two jobs meet on one port, or the nodes were started with different --nnodes or --nproc",
            fix="the same --nnodes and --nproc on every node, and a port of its own for each job",
        )
    if zero["torch"] != torch.__version__:
        logger.warning(
            "rank %d on %s has torch %s, rank 0 has %s",
            place.rank,
            place.host,
            torch.__version__,
            zero["torch"],
        )


def _missing(place: Place, store: Any) -> list[int]:
    return [r for r in range(place.world_size) if not store.check([f"here/{r}"])]


def _missing_error(place: Place, store: Any, timeout_s: float) -> StartError:
    missing = _missing(place, store)
    here = {r: _read(store, f"here/{r}")["host"] for r in range(place.world_size) if r not in missing}
    return StartError(
        "AR008",
        f"{_names(missing)} of {place.world_size} did not arrive in {timeout_s:g} s",
        why="here are " + ", ".join(f"rank {r} on {h}" for r, h in here.items()),
        fix=f"look at what {_names(missing)} printed; if it is only slow to start, start(start_timeout_s=...) waits longer",
    )


def _names(ranks: list[int]) -> str:
    """'rank 3', 'ranks 1, 2, 5'; long lists as runs: 'ranks 8-15'."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs]
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(parts)}"


def _read(store: Any, key: str) -> dict[str, Any]:
    return json.loads(store.get(key))


def _spread(store: Any, error: StartError) -> None:
    """Let all who wait end with this error; the first counts."""
    if store.add("verdicts", 1) == 1:
        story = {"code": error.code, "what": error.what, "why": error.why, "fix": error.fix}
        store.set("verdict", json.dumps(story))
    store.add("have_read", 1)


def _linger(store: Any) -> None:
    deadline = time.monotonic() + _LINGER_S
    while store.add("have_read", 0) < store.add("came", 0) and time.monotonic() < deadline:
        time.sleep(0.02)
