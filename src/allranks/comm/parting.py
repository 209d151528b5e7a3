"""How do ranks part? The group is destroyed; a rank that leaves with an exception tells the others why first.

a rank fails            it writes its story, destroys its group (which wakes the others), and goes
a rank feels the echo   "Connection closed by peer": it looks for the story and raises that instead
rank 0                  goes last where the store ends with it, so that the others can still read
"""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta

import torch.distributed as dist

from allranks.comm.membership import Membership, failure_of, first_failure, write_failure
from allranks.comm.memory import leave_all
from allranks.core.errors import CommError

logger = logging.getLogger(__name__)

_ASK_S = 1.0  # the connection breaks a moment before or after the story is written
_LINGER_S = 2.0  # how long a failing rank 0 keeps the store for the others

# What torch's backends say of a peer that is gone. A timeout is both: this rank is a victim, and its leaving has victims of its own.
_ECHOES = (
    "Connection closed by peer", "Connection reset by peer", "Connection was likely closed", "Broken pipe", "pair closure",
    "remote process exited", "Connection refused", "NCCL communicator was aborted",
)  # fmt: skip
_TIMEOUTS = ("Timed out waiting", "timed out", "Timeout")


def part(membership: Membership, error: BaseException | None) -> BaseException | None:
    """Leave the group. With an error, tell the others first; without a cause of our own, ask whether another rank failed.

    Not a collective: a rank may part while others are stuck or gone. With an error it takes at most about 3 s. Without one, rank 0
    waits for the others where the store ends with it, as long as a step may take.

    Returns:
        The error to raise instead of `error`, where another rank's failure explains ours; otherwise None.
    """
    told: BaseException | None = None
    store = membership.store
    if store is not None:
        with contextlib.suppress(Exception):  # nothing may keep a failing rank from ending
            store.set_timeout(timedelta(seconds=2))
            if error is None:
                store.set(f"left/{membership.place.rank}", b"")
            else:
                told = _tell_or_ask(membership, error)
        with contextlib.suppress(Exception):
            store.add("left", 1)
    leave_all()
    if membership.owns_group and dist.is_initialized() and _may_destroy(error):
        dist.destroy_process_group()
    if membership.serves_store and store is not None:
        told = _go_last(membership, error) or told
    membership.owns_group = membership.serves_store = False
    membership.store = membership.server = None
    return told


def _may_destroy(error: BaseException | None) -> bool:
    # NCCL's destroy waits for collectives in flight, which after a failure may never end; the process' exit frees them.
    return error is None or "nccl" not in dist.get_backend_config()


def _tell_or_ask(membership: Membership, error: BaseException) -> BaseException | None:
    if isinstance(error, CommError) and error.code in ("AR020", "AR022"):
        return None  # it is another rank's story already
    echo = _echo_in(error)
    if echo is None:
        write_failure(membership, error)
        return None
    line = (str(echo).splitlines() or [""])[0]
    # gloo says it in a line of 400 characters
    heard = next((sign for sign in (*_ECHOES, _TIMEOUTS[0]) if sign in line), line[:160])
    deadline = time.monotonic() + _ASK_S
    while time.monotonic() < deadline:
        story = first_failure(membership)
        if story is not None:
            return failure_of(story, f"felt the consequence: {heard}")
        time.sleep(0.02)
    left = _has_left(membership)
    if left is not None:
        return left
    if any(sign in line for sign in _TIMEOUTS):
        write_failure(membership, error)  # the others will feel that we go, and have no better story either
    return None


def _echo_in(error: BaseException) -> BaseException | None:
    """The error, or what it was raised from, that may be only the echo of another rank's failure; None if there is none."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, (dist.DistBackendError, dist.DistNetworkError)):
            return link
        if isinstance(link, RuntimeError) and any(sign in str(link) for sign in (*_ECHOES, _TIMEOUTS[0])):
            return link
        link = link.__cause__ or link.__context__
    return None


def _has_left(membership: Membership) -> CommError | None:
    """The error for a rank that went away in good order while this one needed it."""
    place = membership.place
    gone = [r for r in range(place.world_size) if r != place.rank and membership.store.check([f"left/{r}"])]
    if not gone:
        return None
    who = f"rank{'s' * (len(gone) != 1)} {', '.join(map(str, gone))}"
    return CommError(
        "AR022",
        f"{who} left the run while rank {place.rank} still needed {'it' if len(gone) == 1 else 'them'}",
        why="the `with allranks.start(...)` block ended there, by its last line or by sys.exit(0)",
        fix="the same number of steps on every rank; run.stop(reason) ends all ranks after the same epoch",
    )


def _go_last(membership: Membership, error: BaseException | None) -> CommError | None:
    """Keep rank 0's store until the others have left; after a failure 2 s at most. Another rank's failure is ours to raise, too."""
    place, store = membership.place, membership.store
    told: CommError | None = None
    limit, pause = (membership.timeout_s if error is None else _LINGER_S), 0.005
    deadline = time.monotonic() + limit
    with contextlib.suppress(Exception):  # nothing may keep a rank from ending
        while (are_here := store.add("left", 0) < place.world_size) and time.monotonic() < deadline:
            if error is None and told is None and (story := first_failure(membership)):
                told = failure_of(story, "had finished its part")
                deadline = time.monotonic() + _LINGER_S
            time.sleep(pause)
            pause = min(0.1, pause * 1.5)
        if error is None and told is None:
            story = first_failure(membership)
            told = failure_of(story, "had finished its part") if story else None
            if are_here and told is None:
                late = [str(r) for r in range(1, place.world_size) if not store.check([f"left/{r}"])]
                logger.warning("rank 0 leaves: in %.0f s these ranks have not: %s", limit, ", ".join(late))
    return told
