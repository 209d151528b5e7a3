"""What is said about an end that no rank's failure explains: a node is lost, or somebody asked for it.

Pure.
"""

from __future__ import annotations

import signal
from typing import Any

from allranks.core.job import RankExit
from allranks.run.members import Node
from allranks.run.story import Story
from allranks.run.tracebacks import is_consequence, last_traceback

EXIT_MACHINE = 3
"""The launcher's exit code when the machines or the network failed, not the program."""


def story_of_lost(lost: list[Node]) -> Story:
    """Nodes that are gone, without a watcher's word on it."""
    lines = []
    for node in lost:
        ranks = node.seat.ranks if node.seat else ()
        names = (
            f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "no rank"
        )
        at = f" ({node.address})" if node.address else ""
        number = node.seat.node_rank if node.seat else "?"
        lines.append(
            f"AR320 node {number} = host {node.hello.host}{at} with {names} is lost: {node.lost_why}"
        )
    lines.append(
        "  why:   closed = its agent ended or was killed; silent = power, network or a frozen machine"
    )
    lines.append("  more:  allranks explain AR320")
    return Story("AR320", "\n".join(lines), EXIT_MACHINE, None)


def as_asked(exit: RankExit, number: int) -> bool:
    """Whether a rank ended as the forwarded signal makes a plain script end."""
    by_signal = exit.signal is not None and exit.signal in (number, signal.SIGTERM, signal.SIGKILL)
    if exit.by_us or by_signal or exit.code in (128 + number, 130):
        return True
    said = last_traceback(exit.last_lines)
    return said is not None and (
        said.type == "KeyboardInterrupt" or is_consequence(f"{said.type}: {said.message}")
    )


def stopped_text(failed: list[RankExit], number: int) -> str:
    """One line for a job that was ended by a signal."""
    names = ", ".join(str(e.rank) for e in sorted(failed, key=lambda e: e.rank)[:16])
    return f"stopped by {signal.Signals(number).name}; rank{'s' * (len(failed) > 1)} {names} ended by it"


def cut_off_text(nodes: list[dict[str, Any]], hub_rank: int, host: str, why: str) -> str:
    """A node's last word when it does not hear the hub any more."""
    hub = nodes[hub_rank] if nodes else {"host": host, "address": ""}
    return (
        f"AR322 this node has lost the node where the job meets, host {hub['host']} {hub['address']}: {why}\n"
        "  why:   closed = its agent ended or was killed; silent = power, network or a frozen machine\n"
        "  more:  allranks explain AR322"
    )
