"""Which way of sending gradients is the fastest here? The link is measured, the likely ones are tried in turn, the clock decides.

    updates 1, 2     as DDP does it; DDP makes its buckets anew after the first
    update 3         the link is measured: the delay of a small exchange, the rate of a large one; what each method would take follows
    a few updates    each method that may be the fastest, in turn; the median time per update of each
    then             the fastest; of two within 3 % of each other, the one that loses less
    every 500        again, since links change; and once after 8 updates, whether it keeps what the trial promised

Every number is brought together over the ranks first, so all ranks come to one choice. Times are those of whole updates, from one
backward's first bucket to the next one's: what overlaps with computing does not count, what compressing costs does.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from allranks.wrap.exchange import Exchange

logger = logging.getLogger(__name__)

FIRST, TRIES, KEEPS, AGAIN = 2, 4, 8, 500
WORTH = 0.03  # a gain below this is not worth losing bits for
_HOPELESS = 1.3  # predicted to take so many times the best prediction: not tried
_SMALL, _LARGE = 256, 256 << 10  # float32 values of the two probes of the link


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between the ranks that use the network."""

    delay_s: float
    bytes_per_s: float

    def time_s(self, num_bytes: float, rounds: int) -> float:
        """Of an exchange."""
        return rounds * self.delay_s + num_bytes / self.bytes_per_s


@dataclass(slots=True)
class Choice:
    """What was chosen, and why."""

    method: str
    link: Link | None
    predicted_s: dict[str, float]  # time per update; nothing where it was not measured again
    measured_s: dict[str, float]

    def text(self) -> str:
        """For the log."""
        measured = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in self.measured_s.items())
        parts = [f"{self.method}: per update {measured}"]
        if self.link is not None:
            rate, delay = self.link.bytes_per_s * 8e-6, self.link.delay_s * 1e3
            parts.append(f"the link gives {rate:.0f} Mbit/s and {delay:.1f} ms a way")
            skipped = {n: s for n, s in self.predicted_s.items() if n not in self.measured_s}
            if skipped:
                parts.append("not tried: " + ", ".join(f"{n} ({1e3 * s:.0f} ms)" for n, s in skipped.items()))
        return "; ".join(parts)


@dataclass
class Chooser:
    """Decides for one exchange, which calls begin() at the first bucket of each synchronised backward.

    Args:
        exchange: Whose method is set.
        allowed: What may be chosen, nothing lost first.
        on_choice: Told each time one is chosen, on every rank.
    """

    exchange: Exchange
    allowed: Sequence[str]
    on_choice: Callable[[Choice], None] | None = None
    chosen: str = ""
    clock: Callable[[], float] = time.perf_counter
    _count: int = 0
    _last: float = 0.0
    _plan: list[tuple[str, bool]] = field(
        default_factory=list
    )  # of coming updates: method, whether it is timed
    _timed: str = ""  # the method of the update that now ends, if it is timed
    _times: dict[str, list[float]] = field(default_factory=dict)
    _medians: dict[str, float] = field(default_factory=dict)
    _link: Link | None = None
    _predicted: dict[str, float] = field(default_factory=dict)
    _next_trial: int = FIRST
    _is_checked: bool = True  # whether the chosen one kept its promise

    def begin(self) -> None:
        """A synchronised backward has its first bucket. Collective, in some of them."""
        now = self._now()
        took, self._last = now - self._last, now
        if self._timed:
            self._times.setdefault(self._timed, []).append(took)
            self._timed = ""
            if not self._plan:
                self._conclude()
        self._count += 1
        if len(self.allowed) > 1 and not self._plan and self._count > self._next_trial:
            self._start_trial(took)
        if self._plan:
            name, is_timed = self._plan.pop(0)
            self._timed = name if is_timed else ""
            if name != self.exchange.name:
                self.exchange.use(name)

    def _now(self) -> float:
        if self._plan or self._timed or self._count <= FIRST:
            device = self.exchange.device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return self.clock()

    def _start_trial(self, took: float) -> None:
        """Measure the link, and plan which methods to try. Collective."""
        self._times, self._next_trial = {}, self._count + AGAIN
        self._link, mine = measure(self.exchange, self.allowed, self.clock)
        costs = _largest([*mine, took])
        *costs, took = costs
        rest = max(0.0, took - costs[self.allowed.index(self.exchange.name)])
        self._predicted = {name: rest + cost for name, cost in zip(self.allowed, costs, strict=True)}
        best = min(self._predicted.values())
        tried = [n for n in self.allowed if n == "none" or self._predicted[n] <= _HOPELESS * best]
        self._plan = [(n, i > 0) for n in tried for i in range(TRIES + 1)]

    def _conclude(self) -> None:
        """All planned updates were timed: choose, or see whether the choice kept its promise. Collective."""
        names = list(self._times)
        medians = dict(zip(names, _largest([statistics.median(self._times[n]) for n in names]), strict=True))
        self._times = {}
        if len(names) == 1 and self._medians:
            self._medians.update(medians)  # the check of the choice
        else:
            self._medians, self._is_checked = medians, False
        before = self.chosen
        self.chosen = pick(self._medians, self.allowed)
        if self.chosen != self.exchange.name:
            self.exchange.use(self.chosen)
        if self.chosen != before or not self._is_checked:
            choice = Choice(self.chosen, self._link, dict(self._predicted), dict(self._medians))
            if self.on_choice is not None:
                self.on_choice(choice)
        if not self._is_checked:
            self._is_checked = True
            if len(names) > 1:
                self._plan = [(self.chosen, i > 0) for i in range(KEEPS + 1)]

    def state_dict(self) -> dict[str, Any]:
        """So that a run goes on as it was."""
        return {"chosen": self.chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with what was chosen; what the link is now is measured again."""
        chosen = state["chosen"]
        if chosen in self.allowed:
            self.chosen = chosen
            self.exchange.use(chosen)


def pick(medians: Mapping[str, float], allowed: Sequence[str]) -> str:
    """The fastest; of those within WORTH of it, the one that loses least."""
    best = min(medians.values())
    return next(n for n in allowed if n in medians and medians[n] <= best * (1 + WORTH))


def measure(
    exchange: Exchange, allowed: Sequence[str], clock: Callable[[], float]
) -> tuple[Link, list[float]]:
    """The link as this rank sees it, and what each method would take for its exchange; ranks without the network say 0. Collective."""
    if not exchange.is_leader:
        return Link(0.0, float("inf")), [0.0] * len(allowed)
    num_members = dist.get_world_size(exchange.group)
    times: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    for size, rounds in ((_SMALL, 4), (_LARGE, 3)):
        probe = torch.zeros(size, device=exchange.device)
        for _ in range(rounds):
            begun = clock()
            dist.all_reduce(probe, group=exchange.group)
            float(probe[0])  # waits for a GPU
            times[size].append(clock() - begun)
    small, large = (min(times[size][1:]) for size in (_SMALL, _LARGE))
    sent = 2 * (num_members - 1) / num_members * 4
    delay = small / (2 * (num_members - 1))
    link = Link(delay, sent * (_LARGE - _SMALL) / max(large - small, 1e-9))
    costs = [
        sum(link.time_s(m.wire_bytes(dtype.itemsize), m.rounds()) for dtype, m in exchange.make(name).items())
        for name in allowed
    ]
    return link, costs


def _largest(mine: Sequence[float]) -> list[float]:
    """The largest value of each over all ranks: one number for all. Collective."""
    numbers = torch.tensor(list(mine), dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return numbers.tolist()
