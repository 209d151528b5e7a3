"""What do tests of meeting and parting share: ports, variables as a user sets them, every rank's error?"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from allranks.core.errors import AllranksError
from support.ranks import Outcome


def free_port() -> int:
    """A port that nobody has now, below the range from which client sockets take theirs.

    Tests that run side by side take theirs from ranges of their own: their pids are neighbours, and a store on a port that another
    test has just found free would be met by the wrong ranks.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    for number in _numbers:
        port = 20000 + 1500 * worker + number % 1500
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


_numbers = iter(range(os.getpid() % 1500, 1 << 30))


def by_hand(port: int) -> dict[str, str]:
    """Variables as a user sets them: rank 0 serves the store, no launcher does."""
    return {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def errors_of(outcomes: Sequence[Outcome]) -> list[AllranksError]:
    """Every rank's error, which must be one of ours."""
    for outcome in outcomes:
        assert isinstance(outcome.error, AllranksError), outcome.story()
    return [outcome.error for outcome in outcomes]  # type: ignore[misc]
