"""How do the ranks come together, and how do they part?

store            every rank connects to rank 0's store (or torchrun's)
roll call        every rank writes who it is; whoever has not come by the deadline is named
process group    torch's own, on the same store, with the timeout for steps
...
parting          the group is destroyed; a rank that leaves with an exception tells the others why first
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - torch documents it

from allranks.comm.devices import backend_for
from allranks.core.errors import CommError, StartError
from allranks.core.place import Place

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Membership:
    """The group this process is in, and the store by which ranks can talk without a collective. None, None when alone."""

    place: Place
    store: dist.Store | None = None
    owns_group: bool = False  # we made the group, so we destroy it
    timeout_s: float = 600.0
    failed: bool = False
    _server: Any = field(default=None, repr=False)  # keeps rank 0's store alive


def join(
    place: Place,
    device: torch.device,
    *,
    start_timeout_s: float,
    timeout_s: float,
    backend: str | None = None,
) -> Membership:
    """Bring all ranks of the job together. Collective; a world of one needs no group and makes none.

    Args:
        place: Who we are.
        device: This rank's device, for the backend.
        start_timeout_s: Seconds until ranks that have not arrived are named in an error.
        timeout_s: Seconds a collective may take afterwards.
        backend: torch's name of a backend; chosen from the device if not given.

    Raises:
        StartError: AR008 ranks are missing, AR009 two processes say they are the same rank, AR010 ranks disagree on the world size,
            AR011 the store cannot be reached, AR012 a group exists already with another rank or size.
    """
    if dist.is_initialized():
        return _adopt(place, timeout_s)
    if place.world_size == 1:
        return Membership(place)
    server, store = _connect(place, start_timeout_s)
    call_roll(place, store, start_timeout_s)
    store.set_timeout(timedelta(seconds=start_timeout_s))
    dist.init_process_group(
        backend or backend_for(device),
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return Membership(place, store, owns_group=True, timeout_s=timeout_s, _server=server)


def _adopt(place: Place, timeout_s: float) -> Membership:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (place.rank, place.world_size):
        raise StartError(
            "AR012",
            f"a process group exists with rank {rank} of {size}, but the launcher's variables say rank {place.rank} of {place.world_size}",
            fix="call allranks.start() before dist.init_process_group, or not call the latter at all",
        )
    return Membership(place, PrefixStore("allranks", _default_store()), owns_group=False, timeout_s=timeout_s)


def _default_store() -> Any:
    return (
        dist.distributed_c10d._get_default_store()
    )  # torch has no public name for the store of an existing group


def _connect(place: Place, timeout_s: float) -> tuple[Any, dist.Store]:
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        server = dist.TCPStore(
            place.master_addr,
            place.master_port,
            is_master=place.rank == 0 and not agent_has_it,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:  # dist.DistNetworkError is a RuntimeError
        text = str(error).splitlines()[0]
        in_use = "EADDRINUSE" in str(error) or "in use" in text
        raise StartError(
            "AR011",
            f"rank {place.rank} cannot {'listen on' if place.rank == 0 and not agent_has_it else 'reach rank 0 at'} "
            f"{place.master_addr}:{place.master_port}",
            why=text,
            fix="another MASTER_PORT: this one is taken"
            if in_use
            else "is rank 0 running on that host, and does a firewall let this port through? MASTER_ADDR must be its name or address",
        ) from error
    # A restarted job meets again on torchrun's store, where the keys of the attempt before still stand.
    return server, PrefixStore(f"allranks/{place.attempt}", server)


def call_roll(place: Place, store: Any, timeout_s: float, say_every_s: float = 10.0) -> None:
    """Wait until every rank has written its name into the store; name those that have not by the deadline. Collective."""
    me = {"host": place.host, "pid": os.getpid(), "world_size": place.world_size, "torch": torch.__version__}
    if store.add(f"count/{place.rank}", 1) > 1:
        other = _read(store, f"here/{place.rank}") if store.check([f"here/{place.rank}"]) else {}
        raise StartError(
            "AR009",
            f"two processes say they are rank {place.rank} of {place.world_size}: pid {me['pid']} on {place.host} and "
            f"pid {other.get('pid', '?')} on {other.get('host', '?')}",
            why="likely each node was started with local ranks as if they were ranks, or with the same --node-rank",
            fix="give each node its own --node-rank",
        )
    store.set(f"here/{place.rank}", json.dumps(me))
    deadline = time.monotonic() + timeout_s
    say_at = time.monotonic() + say_every_s
    missing = set(range(place.world_size))
    while True:
        missing = {r for r in missing if not store.check([f"here/{r}"])}
        if not missing:
            break
        now = time.monotonic()
        if now > deadline:
            raise _missing(place, store, missing, timeout_s)
        if now > say_at:
            say_at = now + say_every_s
            logger.warning(
                "rank %d has waited %.0f s for %s", place.rank, timeout_s - (deadline - now), _names(missing)
            )
        time.sleep(0.02 if deadline - now > timeout_s - 5 else 0.25)
    _compare_sizes(place, store)


def _names(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, sorted(ranks)))}"


def _read(store: Any, key: str) -> dict[str, Any]:
    return json.loads(store.get(key))


def _missing(place: Place, store: Any, missing: set[int], timeout_s: float) -> StartError:
    here = {r: _read(store, f"here/{r}")["host"] for r in range(place.world_size) if r not in missing}
    return StartError(
        "AR008",
        f"{_names(missing)} of {place.world_size} did not arrive in {timeout_s:g} s",
        why="here are " + ", ".join(f"rank {r} on {h}" for r, h in sorted(here.items())),
        fix=f"look at what {_names(missing)} printed; start(start_timeout_s=...) waits longer",
    )


def _compare_sizes(place: Place, store: Any) -> None:
    for rank in range(place.world_size):
        other = _read(store, f"here/{rank}")
        if other["world_size"] != place.world_size:
            raise StartError(
                "AR010",
                f"rank {place.rank} says the world size is {place.world_size}, rank {rank} on {other['host']} says {other['world_size']}",
                why="likely two jobs meet on one port, or the nodes were started with different --nnodes or --nproc",
                fix="the same --nnodes and --nproc on every node, and a port of its own for each job",
            )


def part(membership: Membership, error: BaseException | None) -> BaseException | None:
    """Leave the group. With an error, tell the others first; without a cause of our own, ask whether another rank failed.

    Not a collective: a rank may part while others are stuck or gone. Takes at most about 3 s.

    Returns:
        The error to raise instead of `error`, where another rank's failure explains ours; otherwise None.
    """
    told: BaseException | None = None
    if error is not None and membership.store is not None:
        told = _tell_or_ask(membership, error)
    if membership.owns_group and dist.is_initialized():
        # NCCL's destroy waits for collectives in flight, which after a failure may never end; the process' exit frees them.
        if error is None or "nccl" not in dist.get_backend():
            dist.destroy_process_group()
        if error is not None and membership.place.rank == 0:
            _linger(membership)
    membership.owns_group = False
    return told


def _is_consequence(error: BaseException) -> bool:
    """Whether an error may be only the echo of another rank's failure."""
    text = str(error)
    return isinstance(error, (dist.DistBackendError, dist.DistNetworkError, CommError)) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _ECHOES)
    )


_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo",
    "NCCL",
    "Timed out waiting",
    "pair closure",
)


def _tell_or_ask(membership: Membership, error: BaseException) -> BaseException | None:
    place, store = membership.place, membership.store
    assert store is not None
    with contextlib.suppress(Exception):
        store.set_timeout(timedelta(seconds=2))
        if not _is_consequence(error):
            story = {
                "rank": place.rank,
                "host": place.host,
                "error": f"{type(error).__name__}: {error}",
                "at": _where(error),
            }
            store.set(f"failed/{place.rank}", json.dumps(story))
            return None
        first = _first_failure(place, store)
        store.add("read", 1)
        if first is not None:
            return CommError(
                "AR300",
                f"rank {first['rank']} on host {first['host']} failed first: {first['error']}",
                why=f"{first['at']}; what this rank saw is a consequence: {str(error).splitlines()[0]}",
                fix=f"read rank {first['rank']}'s traceback",
            )
    return None


def _first_failure(place: Place, store: Any) -> dict[str, Any] | None:
    # The connection breaks a moment before or after the story is written: give it a second.
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        for rank in range(place.world_size):
            if store.check([f"failed/{rank}"]):
                return _read(store, f"failed/{rank}")
        time.sleep(0.02)
    return None


def _linger(membership: Membership) -> None:
    """Rank 0 holds the store: keep it until the others have read why it left, 2 s at most."""
    deadline = time.monotonic() + 2.0
    store: Any = membership.store
    with contextlib.suppress(Exception):  # nothing may keep a failing rank from ending
        while time.monotonic() < deadline and store.add("read", 0) < membership.place.world_size - 1:
            time.sleep(0.02)


def _where(error: BaseException) -> str:
    tb = error.__traceback__
    last = "unknown line"
    while tb is not None:
        code = tb.tb_frame.f_code
        if "site-packages" not in code.co_filename and f"{os.sep}allranks{os.sep}" not in code.co_filename:
            last = f"{code.co_filename}:{tb.tb_lineno} in {code.co_name}"
        tb = tb.tb_next
    return last


def wait_for_key(store: Any, key: str, timeout_s: float, missing: Callable[[], str]) -> bytes:
    """Wait for a key without a collective, so the group's timeout does not apply.

    Raises:
        CommError: AR302 with the sentence `missing()` once `timeout_s` is over.
    """
    deadline = time.monotonic() + timeout_s
    pause = 0.005
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise CommError(
                "AR302", f"{missing()} within {timeout_s:g} s", fix="a larger timeout_s, if it is only slow"
            )
        time.sleep(pause)
        pause = min(0.25, pause * 1.5)
    return store.get(key)
