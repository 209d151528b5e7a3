"""What does a host's own account say: who uses its cores, is its link the slow one, is a GPU held back, is /dev/shm full?

Each is a function of what agents read once a second; where that is not there (an older run, another system), it is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from allranks.perf.values import (
    HARDWARE,
    POWER_BRAKE,
    POWER_CAP,
    THERMAL,
    GpuState,
    History,
    HostSample,
    Node,
)

MIN_OTHERS = 0.25
"""Cores that other processes must use before they are named."""
MIN_SENT = 2000
"""Segments, before a share of them says something."""
MANY_RESENT = 0.01
"""A sound network sends fewer than one segment in a thousand again."""
OFTEN = 0.5
MIN_HELD, OF_MOST = 16_384, 0.2
"""Bytes that a connection holds back on average, and as a share of what the one with the most does: less is what is on its way."""
LOOKS = 5
SLOWED = 0.2
"""Share of the looks in which a GPU must be held back."""
SLOWER_CLOCK = 0.85
BUSY_PERCENT = 20
_REASONS = {
    THERMAL: "heat",
    POWER_BRAKE: "the power supply",
    HARDWARE: "its hardware",
    POWER_CAP: "its power limit",
}
"""The last is common on all GPUs at full load."""
SURE = THERMAL | POWER_BRAKE | HARDWARE


def others_cores(node: Node | None, since: float, until: float) -> float | None:
    """Cores that processes outside the job used on average."""
    looks = [s for s in _within(node, since, until) if s.host_cpu_s is not None and s.job_cpu_s is not None]
    if len(looks) < 2 or looks[-1].t - looks[0].t < 1.0:
        return None
    first, last = looks[0], looks[-1]
    assert first.host_cpu_s is not None and last.host_cpu_s is not None
    assert first.job_cpu_s is not None and last.job_cpu_s is not None
    theirs = (last.host_cpu_s - first.host_cpu_s) - max(0.0, last.job_cpu_s - first.job_cpu_s)
    return max(0.0, theirs) / (last.t - first.t)


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A host whose connections to the others lose or hold back what its ranks send."""

    host: str
    node: int
    resent: float
    """Share of its TCP segments that were sent once more."""
    held_back: float
    """Share of the looks at which its ranks' connections held data back."""
    queued: float
    """Bytes then, the median."""


def slow_link(history: History, since: float, until: float) -> SlowLink | None:
    """The host whose link is worse than the others' beyond doubt; None if there is none, or nothing says so."""
    links = [_link(node, since, until) for node in history.nodes]
    known = [link for link in links if link is not None]
    if len(known) < 2 or len(known) != len(links):
        return None
    losing = sorted(known, key=lambda link: link.resent)
    if losing[-1].resent >= max(MANY_RESENT, 3 * losing[-2].resent):
        return losing[-1]
    if (common := _common_end(history, since, until)) is not None:
        return next(link for link in known if link.node == common)
    full = sorted(known, key=lambda link: link.held_back * link.queued)
    if (
        full[-1].held_back >= OFTEN
        and full[-1].held_back * full[-1].queued >= 3 * full[-2].held_back * full[-2].queued
    ):
        return full[-1]
    return None


def _common_end(history: History, since: float, until: float) -> int | None:
    """The one host that is an end of all connections between hosts which hold much back; None if there are not two such.

    A host that sends to the slow one holds back, too, for what is not acknowledged counts.
    """
    looks = {node.node: [look for look in _within(node, since, until) if look.sent] for node in history.nodes}
    owner = {a: number for number, found in looks.items() for look in found for a in look.addresses}
    held: dict[tuple[int, int], float] = {}
    for number, found in looks.items():
        for look in found:
            for peer, size in look.held.items():
                if peer in owner and owner[peer] != number:
                    pair = number, owner[peer]
                    held[pair] = held.get(pair, 0.0) + size / len(found)
    most = max(held.values(), default=0.0)
    heavy = [set(pair) for pair, size in held.items() if size >= max(MIN_HELD, most * OF_MOST)]
    if len(heavy) < 2:
        return None
    common = set.intersection(*heavy)
    return common.pop() if len(common) == 1 else None


def _link(node: Node, since: float, until: float) -> SlowLink | None:
    looks = [
        look for look in _within(node, since, until) if look.sent
    ]  # the last one may find no rank to ask
    if len(looks) < LOOKS:
        return None
    sent, resent = looks[-1].sent - looks[0].sent, looks[-1].resent - looks[0].resent
    queues = [look.queued for look in looks if look.queued]
    share = resent / sent if sent >= MIN_SENT else 0.0
    return SlowLink(node.host, node.node, share, len(queues) / len(looks), median(queues) if queues else 0.0)


@dataclass(frozen=True, slots=True)
class SlowGpu:
    """A GPU that runs below its clock."""

    rank: int
    why: str
    mhz: float
    most_mhz: int
    celsius: int
    share: float
    """Of the looks at which it was busy, those at which it was held back."""


def slow_gpus(history: History, since: float, until: float) -> list[SlowGpu]:
    """GPUs that were held back while they worked: by heat or power for certain, else by a clock far below the other ranks'."""
    states = {
        rank.rank: [
            s.gpus[rank.rank]
            for s in _within(history.node_of(rank), since, until)
            if rank.rank in s.gpus and s.gpus[rank.rank].busy_percent >= BUSY_PERCENT
        ]
        for rank in history.ranks
    }
    clocks = {rank: median(s.mhz for s in seen) for rank, seen in states.items() if len(seen) >= LOOKS}
    usual = median(clocks.values()) if len(clocks) > 1 else 0.0
    found = []
    for rank, mhz in clocks.items():
        seen = states[rank]
        held = [s for s in seen if s.reasons & SURE]
        if len(held) >= SLOWED * len(seen):
            found.append(_slow(rank, held, mhz, len(held) / len(seen)))
        elif mhz < SLOWER_CLOCK * min(usual, seen[-1].most_mhz):  # another kind of GPU has another clock
            found.append(_slow(rank, seen, mhz, 1.0))
    return found


def _slow(rank: int, held: Sequence[GpuState], mhz: float, share: float) -> SlowGpu:
    counts = {why: sum(bool(s.reasons & bits) for s in held) for bits, why in _REASONS.items()}
    most = max(counts, key=lambda why: counts[why])
    why = most if counts[most] else "a lower clock that was set"
    return SlowGpu(rank, why, mhz, held[-1].most_mhz, max(s.celsius for s in held), share)


def shm_used(node: Node | None, since: float, until: float) -> int:
    """The most of /dev/shm that was used, bytes; 0 = not known."""
    return max((s.shm_used for s in _within(node, since, until)), default=0)


def _within(node: Node | None, since: float, until: float) -> list[HostSample]:
    return [s for s in node.looks if since - 1.0 <= s.t <= until + 1.0] if node else []
