"""What is known of a run's time? The values that the files under RUN/timeline/ are read into; docs/design/timeline.md.

Times are seconds since the attempt began, on one clock for all ranks (each node's own clock, shifted by `Node.shift_s`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Cumulative seconds of a sample, in the order of the file.
PHASES: tuple[str, ...] = (
    "start",
    "import",
    "init",
    "build",
    "python",
    "data",
    "forward",
    "backward",
    "optimizer",
    "collective",
    "checkpoint",
    "evaluate",
    "exit",
    "copy",
    "log",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One rank at one moment, about once a second; what it counts, it counts since the process began."""

    t: float
    step: int  # optimizer steps that have ended
    phases: dict[str, float]  # seconds in each of PHASES, the one that goes on included
    buffers_s: float = 0.0  # of the forward: DDP's exchange of buffers
    exchanged_s: float = 0.0  # of the backward of timed steps: after the last gradient was there
    exchanged_of_s: float = 0.0  # all of the backward of the same steps
    epoch: int = 0
    loss: float | None = None  # of this rank, the last that was looked at
    cpu_s: float = 0.0  # processor time of the process, all threads
    queue_s: float = 0.0  # its main thread was ready to run and waited for a core
    rss_mb: float = 0.0
    major_faults: int = 0
    drawn: int = 0  # batches, of all passes
    busy_s: float = 0.0  # time that all loader workers together spent on reading batches
    read: int = 0  # batches that loader workers have read
    calls: int = 0  # collectives of the script
    printed: int = 0  # bytes that the rank printed
    throttled_s: float = 0.0  # the cgroup had used up its share of the processors


THERMAL, POWER_CAP, POWER_BRAKE, HARDWARE = 0x20 | 0x40, 0x04, 0x80, 0x08
"""Bits of NVML's clock event reasons (nvml.h, nvmlClocksEventReason*)."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A rank's GPU at one moment, by NVML."""

    mhz: int
    most_mhz: int
    celsius: int
    reasons: int  # bits, as above: what holds its clock back
    busy_percent: int


@dataclass(frozen=True, slots=True)
class HostSample:
    """One host at one moment; what it counts, it counts since some moment before the attempt."""

    t: float
    host_cpu_s: float | None = None  # all cores together were not idle
    job_cpu_s: float | None = None  # of that, this job's ranks, loader workers and agent
    shm_used: int = 0  # bytes of /dev/shm
    sent: int = 0  # TCP segments
    resent: int = 0  # TCP segments that were sent once more
    queued: int = 0  # bytes that the ranks' connections to other hosts hold back
    held: dict[str, int] = field(default_factory=dict)  # of that, by the address of the other host
    addresses: list[str] = field(default_factory=list)  # of this host, on its side of them
    gpus: dict[int, GpuState] = field(default_factory=dict)  # by rank


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The moments of one step; None where a step has no such moment. Of an accumulated step, of its last micro-step."""

    step: int  # 1 = the first
    start: float  # the step before ended; of the first: its first mark
    end: float  # Optimizer.step came back
    data: tuple[float, float] | None = None  # the last batch was asked for, and there
    forward: tuple[float, float] | None = None
    buffers: tuple[float, float] | None = None  # inside forward
    backward: tuple[float, float] | None = None
    ready: float | None = None  # the last gradient was there: from now on the backward only communicates
    optimizer: float | None = None  # began
    copy_s: float = 0.0  # moved its batches to the device

    @property
    def exchange(self) -> tuple[float, float] | None:
        """From the last gradient to the end of the backward."""
        if self.ready is None or self.backward is None:
            return None
        return min(max(self.ready, self.backward[0]), self.backward[1]), self.backward[1]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """One collective that the script (or the library) called."""

    op: str
    group: str
    seq: int  # in its group; the same number on all ranks is the same meeting; -1 not known
    step: int  # steps that had ended
    entered: float
    exited: float | None  # None = it did not come back
    line: str = ""
    bytes: int = 0
    is_async: bool = False


@dataclass(frozen=True, slots=True)
class RankHistory:
    """One rank of one attempt."""

    rank: int
    node: int
    host: str
    pid: int
    samples: tuple[Sample, ...] = ()
    steps: tuple[StepTimes, ...] = ()  # some steps of each second, the last ones all
    calls: tuple[CallTimes, ...] = ()  # some of each second
    facts: dict[str, Any] = field(default_factory=dict)  # docs/design/timeline.md lists them


@dataclass(frozen=True, slots=True)
class Node:
    """One host of one attempt."""

    node: int
    host: str
    unix_s: float  # when the attempt began there, by its own clock
    shift_s: float = 0.0  # added to its times so that collectives end together; node 0 has 0
    facts: dict[str, Any] = field(default_factory=dict)
    looks: tuple[HostSample, ...] = ()  # some of each second


@dataclass(frozen=True, slots=True)
class History:
    """One attempt of a run."""

    attempt: int
    attempts: int  # how many there were
    world_size: int
    nodes: tuple[Node, ...] = ()
    ranks: tuple[RankHistory, ...] = ()  # by rank; those that wrote something

    def rank(self, number: int) -> RankHistory | None:
        """The history of a rank."""
        return next((r for r in self.ranks if r.rank == number), None)

    def node_of(self, rank: RankHistory) -> Node | None:
        """The host a rank ran on."""
        return next((n for n in self.nodes if n.node == rank.node), None)

    def shared_steps(self) -> tuple[int, ...]:
        """Steps whose moments are known of every rank, ascending: what a timeline of all ranks can show."""
        if not self.ranks:
            return ()
        found = set.intersection(*({s.step for s in r.steps} for r in self.ranks))
        return tuple(sorted(found))


def ms(value: float) -> str:
    """Seconds as milliseconds."""
    return f"{value * 1e3:.1f} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"
