"""What do causes look at? A history, the parts of its steps, and what each rank used; worked out once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from allranks.perf.breakdown import Breakdown, RankParts, breakdown
from allranks.perf.hosts import others_cores
from allranks.perf.straggler import Straggler, batch_s, find_straggler
from allranks.perf.values import CallTimes, History, Node, RankHistory, Sample


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that makes the run slower than it need be."""

    code: str
    name: str
    title: str  # one sentence, with the numbers
    fix: str
    ranks: tuple[int, ...]
    costs_s: float  # of each step, as far as it can be said; 0 = not known
    share: float  # the same, of the step
    facts: tuple[str, ...] = ()


class View:
    """A history as causes see it."""

    def __init__(self, history: History, found: Breakdown | None = None) -> None:
        self.history = history
        self.found = found if found is not None else breakdown(history)
        self._edges: dict[int, tuple[Sample, Sample] | None] = {}

    @cached_property
    def ranks(self) -> list[RankParts]:
        """The parts of the ranks that made steps."""
        return [r for r in self.found.ranks if r.steps]

    @cached_property
    def straggler(self) -> Straggler | None:
        return find_straggler(self.history, self.found)

    @cached_property
    def step_s(self) -> float:
        """Seconds a step, over the ranks."""
        return sum(r.step_s for r in self.ranks) / len(self.ranks) if self.ranks else 0.0

    @property
    def steps(self) -> int:
        """Steps that every rank made in the time looked at."""
        return min((r.steps for r in self.ranks), default=0)

    @property
    def seconds(self) -> float:
        """The time looked at."""
        return max((r.until - r.since for r in self.ranks), default=0.0)

    def mean(self, part: str) -> float:
        """Seconds of a part a step, over the ranks."""
        return sum(r.per_step(part) for r in self.ranks) / len(self.ranks) if self.ranks else 0.0

    def share(self, part: str) -> float:
        """Share of a part in the step."""
        return self.mean(part) / self.step_s if self.step_s else 0.0

    def rank(self, number: int) -> RankHistory:
        """The history of a rank that made steps."""
        found = self.history.rank(number)
        assert found is not None
        return found

    def facts(self, number: int) -> dict[str, Any]:
        """What is known of a rank."""
        return self.rank(number).facts

    def replica(self, number: int) -> dict[str, Any]:
        """What DistributedDataParallel says of itself on a rank; empty without one."""
        return self.facts(number).get("replica", {})

    def threads(self, number: int) -> int:
        """Threads that a rank computes with: as torch has them, else as its environment asks for; 0 = not known."""
        return int(self.replica(number).get("threads") or self.facts(number).get("omp_threads", 0))

    def node(self, number: int) -> Node | None:
        """The host of a rank."""
        return self.history.node_of(self.rank(number))

    def others_cores(self, number: int) -> float | None:
        """Cores that processes outside this job use on a rank's host; None = not known."""
        parts = next(r for r in self.ranks if r.rank == number)
        return others_cores(self.node(number), parts.since, parts.until)

    def node_facts(self, number: int) -> dict[str, Any]:
        """What is known of a rank's host."""
        node = self.node(number)
        return node.facts if node else {}

    def cores(self, number: int) -> int:
        """Cores that the ranks of this rank's host may use together; 0 = not known."""
        return int(self.node_facts(number).get("cores", 0))

    def ranks_beside(self, number: int) -> int:
        """How many ranks are on this rank's host."""
        return sum(r.node == self.rank(number).node for r in self.history.ranks)

    def edges(self, number: int) -> tuple[Sample, Sample] | None:
        """The first and the last sample of the time looked at."""
        if number not in self._edges:
            parts = next(r for r in self.ranks if r.rank == number)
            inside = [s for s in self.rank(number).samples if parts.since <= s.t <= parts.until]
            self._edges[number] = (inside[0], inside[-1]) if len(inside) > 1 else None
        return self._edges[number]

    def used(self, number: int, name: str) -> float:
        """How much a count of the samples grew, a step."""
        edges = self.edges(number)
        if edges is None:
            return 0.0
        grown = getattr(edges[1], name) - getattr(edges[0], name)
        return max(0.0, grown) / max(1, edges[1].step - edges[0].step)

    def batch_s(self, number: int) -> float:
        """What a loader worker needs for a batch; 0 = not known."""
        edges = self.edges(number)
        return batch_s(*edges) if edges else 0.0

    def waits_for_core(self, number: int) -> float:
        """Share of its time in which a rank's main thread is ready to run and gets no core."""
        edges = self.edges(number)
        if edges is None or edges[1].t <= edges[0].t:
            return 0.0
        waited = max(0.0, edges[1].queue_s - edges[0].queue_s)
        return min(
            1.0, waited / (edges[1].t - edges[0].t)
        )  # the kernel counts a wait when it ends, also what was before the edge

    def calls(self) -> list[CallTimes]:
        """Collectives of the script that are known, of all ranks."""
        return [call for rank in self.history.ranks for call in rank.calls]


def who(ranks: tuple[int, ...], world_size: int) -> str:
    """Ranks in words."""
    if len(ranks) == world_size > 1:
        return "all ranks"
    names = ", ".join(map(str, ranks[:6])) + (" ..." if len(ranks) > 6 else "")
    return f"rank{'s' * (len(ranks) != 1)} {names}"
