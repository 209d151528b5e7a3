"""How do the ranks come together?

store            every rank connects to rank 0's store (or the launcher's)
roll call        every rank writes who it is; whoever has not come by the deadline is named (roll_call.py)
process group    torch's own, on the same store, with the timeout for steps
...
parting          parting.py
"""

from __future__ import annotations

import logging
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - torch documents them

from allranks.comm.devices import backend_for
from allranks.comm.membership import Membership
from allranks.comm.roll_call import call_roll
from allranks.core.errors import StartError
from allranks.core.place import Place

logger = logging.getLogger(__name__)

_SAY_EVERY_S = 10.0
_joins = 0  # of this process: a second run in it must not find the first one's keys on a store that lives on


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
            AR011 the store cannot be reached, AR012 a group exists already that does not fit.
    """
    if dist.is_initialized():
        return _adopt(place, timeout_s)
    if place.world_size == 1:
        return Membership(place, timeout_s=timeout_s)
    serves = place.rank == 0 and not _launcher_serves()
    server, store = _meet(place, serves, start_timeout_s)
    store.set_timeout(timedelta(seconds=start_timeout_s))
    dist.init_process_group(
        backend_for(device, backend),
        store=PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return Membership(place, store, True, serves, timeout_s, server)


def _meet(place: Place, serves: bool, timeout_s: float) -> tuple[Store, Store]:
    """The store, and the part of it that is this run's, once all ranks have come."""
    begun, number = time.monotonic(), _next_join()
    while True:
        left = timeout_s - (time.monotonic() - begun)
        server = _serve(place, timeout_s) if serves else _reach(place, timeout_s, left)
        # A restarted job meets again on the launcher's store, where the keys of the attempt before still stand.
        store = PrefixStore(f"allranks/{place.attempt}/{number}", server)
        try:
            call_roll(place, store, timeout_s, begun=begun, serves_store=serves)
        except StartError as error:
            # This may have been the store of this process' run before, which rank 0 was about to close.
            if error.code != "AR011" or serves or number == 1 or time.monotonic() - begun > timeout_s:
                raise
            logger.debug("rank %d meets rank 0 again: %s", place.rank, error.what)
        else:
            return server, store


def _launcher_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _next_join() -> int:
    global _joins
    _joins += 1
    return _joins


def _adopt(place: Place, timeout_s: float) -> Membership:
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (place.rank, place.world_size):
        says = f"the launcher's variables say rank {place.rank} of {place.world_size}"
        raise StartError(
            "AR012",
            f"a process group exists with rank {rank} of {size}, but "
            + (says if place.launcher != "alone" else "RANK and WORLD_SIZE are not set"),
            fix="leave dist.init_process_group to allranks.start"
            + (
                f"; in processes that you start yourself, set RANK={rank} WORLD_SIZE={size} LOCAL_RANK MASTER_ADDR MASTER_PORT first"
                if place.launcher == "alone"
                else ""
            ),
        )
    if size > 1 and "cpu:" not in dist.get_backend_config():
        raise StartError(
            "AR012",
            f"a process group exists with the backends {dist.get_backend_config()!r}, and none for tensors on a CPU",
            fix='dist.init_process_group("cpu:gloo,cuda:nccl"), or leave it to allranks.start',
        )
    if size == 1:
        return Membership(place, timeout_s=timeout_s)
    store = PrefixStore(f"allranks/{_next_join()}", _default_store())
    return Membership(place, store, serves_store=rank == 0 and not _launcher_serves(), timeout_s=timeout_s)


def _default_store() -> Any:
    return (
        dist.distributed_c10d._get_default_store()
    )  # torch has no public name for the store of an existing group


def _serve(place: Place, timeout_s: float) -> Store:
    """Rank 0: open the store. It connects to itself by 127.0.0.1: whether MASTER_ADDR leads here is for the others to find out."""
    _warn_if_elsewhere(place)
    try:
        return TCPStore(
            "127.0.0.1",
            place.master_port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:  # dist.DistNetworkError is one
        text = str(error).splitlines()[0]
        is_taken = "EADDRINUSE" in str(error) or "in use" in text
        raise StartError(
            "AR011",
            f"rank 0 cannot listen on port {place.master_port} of {place.host}",
            why="another process has this port: another job, or a second rank 0" if is_taken else text,
            fix="MASTER_PORT=<a free port>, the same on all ranks; one rank 0 only",
        ) from error


def _warn_if_elsewhere(place: Place) -> None:
    """Warn if MASTER_ADDR is no address of this host: right behind a service address (Kubernetes), else a mistake."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(place.master_addr, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        logger.warning(
            "MASTER_ADDR=%s does not lead to this host, %s, where rank 0 runs (%s); the others will look for it there",
            place.master_addr,
            place.host,
            error.strerror or error,
        )


def _reach(place: Place, timeout_s: float, left_s: float) -> Store:
    """Connect to the store, which may not be there yet, nor even the name of its host; say what is missing every 10 s."""
    begun = time.monotonic()
    say_at = begun + _SAY_EVERY_S
    where = (place.master_addr, place.master_port)
    while True:
        try:
            # torch's own attempts print pages of native stack for each refusal: knock first.
            socket.create_connection(where, timeout=min(5.0, timeout_s)).close()
            left = max(1.0, begun + left_s - time.monotonic())
            return TCPStore(*where, is_master=False, timeout=timedelta(seconds=left), wait_for_workers=False)
        except OSError as error:
            why = error.strerror or str(error)
        except RuntimeError as error:  # dist.DistNetworkError is one
            why = str(error).splitlines()[0]
        now = time.monotonic()
        if now - begun >= left_s:
            raise _unreachable(place, timeout_s, why)
        if now > say_at:
            say_at = now + _SAY_EVERY_S
            logger.warning(
                "rank %d has waited %.0f s for rank 0 at %s:%d: %s", place.rank, now - begun, *where, why
            )
        time.sleep(0.05 if now - begun < 5 else 0.5)


def _unreachable(place: Place, timeout_s: float, why: str) -> StartError:
    if "refused" in why:
        advice = "nobody listens there: is rank 0 running, on that host, with the same MASTER_PORT? Read what it printed"
    elif "Name or service" in why or "resolution" in why or "No address" in why:
        advice = f"this host does not know the name {place.master_addr}: give MASTER_ADDR as an address, e.g. 10.0.0.1"
    else:
        advice = "does a firewall let this port through? MASTER_ADDR must be the address of rank 0's host as this host sees it"
    return StartError(
        "AR011",
        f"rank {place.rank} could not reach rank 0 at {place.master_addr}:{place.master_port} in {timeout_s:g} s",
        why=why,
        fix=advice,
    )
