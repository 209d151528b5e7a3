"""What does a rank share with the others besides collectives? A store: who has failed, who has left, what rank 0 has finished.

Nothing here is a collective, so it works while others are stuck, late or gone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from allranks.core.errors import CommError
from allranks.core.place import Place

# allranks itself and the standard library: not where the user looks for his mistake.
_LIBRARIES = (str(Path(__file__).parents[1]) + "/", str(Path(json.__file__).parents[1]) + "/", "<frozen")


@dataclass(slots=True)
class Membership:
    """The group this process is in, and the store by which ranks can talk without a collective; no store when alone."""

    place: Place
    store: Any = None  # torch.distributed.Store
    owns_group: bool = False  # we made the group, so we destroy it
    serves_store: bool = False  # the store ends with this process
    timeout_s: float = 600.0
    server: Any = field(default=None, repr=False)  # keeps rank 0's store alive


def write_failure(membership: Membership, error: BaseException) -> None:
    """Tell the other ranks why this one leaves."""
    place, store = membership.place, membership.store
    first_line = (str(error).splitlines() or [""])[0][:400]
    story = {
        "rank": place.rank,
        "host": place.host,
        "error": f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__,
        "at": _line_of(error.__traceback__),
    }
    # Numbered in the order of failing: the first is the cause, what follows may be its consequence.
    store.set(f"failed/{store.add('failures', 1)}", json.dumps(story))


def first_failure(membership: Membership) -> dict[str, Any] | None:
    """The story of the rank that failed first; None if none has told one."""
    store = membership.store
    return json.loads(store.get("failed/1")) if store.check(["failed/1"]) else None


def failure_of(story: dict[str, Any], consequence: str) -> CommError:
    """Another rank's failure as the error of this rank."""
    return CommError(
        "AR020",
        f"rank {story['rank']} on host {story['host']} failed first: {story['error']}",
        why=f"it was at {story['at']}; this rank only {consequence}",
        fix=f"read the traceback of rank {story['rank']}: the cause is there, not here",
    )


def wait_for_key(
    membership: Membership, key: str, timeout_s: float, what: Callable[[], str], *, begun: float | None = None
) -> bytes:
    """Wait for a key without a collective, so that the group's timeout does not apply; end at once if another rank has failed.

    Args:
        membership: Ours, with a store.
        key: The key.
        timeout_s: Seconds from `begun` on.
        what: The sentence for who or what has not come.
        begun: On time.monotonic(); now if not given.

    Raises:
        CommError: AR021 once the time is over, AR020 another rank failed, AR022 the store is gone.
    """
    store, pause = membership.store, 0.005
    deadline = (time.monotonic() if begun is None else begun) + timeout_s
    try:
        while not store.check([key]):
            story = first_failure(membership)
            # Asked once more: a rank that came here, found all the others and failed after that, has not failed this wait.
            if story is not None and not store.check([key]):
                raise failure_of(story, f"waited: {what()}")
            if story is None and time.monotonic() > deadline:
                raise CommError(
                    "AR021",
                    f"{what()} within {timeout_s:g} s",
                    why="that rank has ended, is stuck, or is only slower than the limit",
                    fix="look at what that rank does (allranks watch); if it is only slow, give a larger timeout_s",
                )
            time.sleep(pause)
            pause = min(0.25, pause * 1.5)
        return store.get(key)
    except dist.DistNetworkError as error:
        raise CommError(
            "AR022",
            f"the ranks' store is gone while rank {membership.place.rank} waited for {key.split('/')[1]}",
            why="it ends with rank 0, or with the launcher: that process has ended",
            fix="read what rank 0 and the launcher printed",
        ) from error


def _line_of(trace: TracebackType | None) -> str:
    """The innermost line that is the user's; of anybody's, if none is."""
    last = any_line = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        any_line = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        if not _is_library(code.co_filename):
            last = any_line
        trace = trace.tb_next
    return last or any_line or "an unknown line"


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARIES) or "site-packages" in filename or "dist-packages" in filename
