"""What is a running job made of, as the agent and the watcher both see it?

The agent (allranks.run) fills these values and gives them to the watcher (allranks.watch), which knows nothing of sockets,
processes or signals of the launcher. They live here, below both, because imports go down only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

OnHang = Literal["report", "stop", "restart"]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank of this node, alive or dead."""

    rank: int
    local_rank: int
    pid: int
    started_at: float
    """time.monotonic() of this host when the process was started."""
    log: Path
    """RUN/ranks/rankN.log: what it printed."""


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank that has ended, cleanly or not."""

    rank: int
    host: str
    node_rank: int
    code: int
    """Exit code of the process; 0 also for a rank that ended well; -1 when a signal ended it."""
    signal: int | None
    when: float
    """Seconds since the ranks of this attempt were started, on that host's monotonic clock."""
    last_lines: tuple[str, ...]
    """The end of what it printed, without line ends; the traceback is in here if it wrote one."""
    pid: int = 0
    by_us: bool = False
    """The agent ended it while stopping the job: never a cause."""

    @property
    def failed(self) -> bool:
        """Whether it ended other than by exit code 0."""
        return self.code != 0 or self.signal is not None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node of the job, as the agent that holds this value sees it now."""

    node_rank: int
    host: str
    ranks: tuple[int, ...]
    row: Row = field(default_factory=dict)
    """What its watcher's row() said in its newest beat; empty before the first."""
    age_s: float = 0.0
    """Seconds since that beat arrived here (0 for this node)."""
    is_lost: bool = False
    """Silent for longer than the limit, or its connection is gone."""
    lost_why: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """This attempt of the job on this node: made anew at each restart."""

    job_id: str
    run_dir: Path
    record_dir: Path | None
    host: str
    node_rank: int
    is_hub: bool
    """Whether this agent decides for all nodes (it is the only one whose tick() sees the others' rows)."""
    world_size: int
    restart: int
    ranks: tuple[RankProcess, ...]
    """The ranks of this node."""
    nodes: tuple[NodeInfo, ...]
    on_hang: OnHang = "report"
    after_s: float | None = None
    """--after: how long a hang may last before on_hang acts; None = not given."""
