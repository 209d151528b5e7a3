"""Which rank do the others wait for, and why is it late?

Not who is slow in the backward: an exchange of gradients makes every rank's backward as long as the slowest one's. Who arrives last at
the meetings waits for nobody, and the others for it. Where the evidence does not decide why, that is said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from allranks.perf.breakdown import PARTS, Breakdown, RankParts, Waits
from allranks.perf.hosts import MIN_OTHERS, others_cores, slow_gpus
from allranks.perf.values import History, RankHistory, Sample, ms

MIN_SHARE, MIN_S = 0.08, 0.001
"""Of the step that the others must wait for it, and at least so many seconds."""
MIN_CAUSED = 0.6
"""Of all waiting it must be the cause of so much."""
OWN = ("data", "copy", "forward", "backward", "optimizer", "checkpoint", "evaluate", "log", "python")


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    host: str
    excess_s: float  # a step, that the others wait and it does not
    share: float  # of the step
    caused: (
        float  # share of all waiting at meetings to which it came last; 0 = no meeting's moments are known
    )
    part: str  # of PARTS, where it spends more than the others; "" = the evidence does not decide
    part_s: float  # how much more, a step
    why: str  # in words
    facts: tuple[str, ...]
    is_decided: bool  # whether `why` follows from what was measured


def find_straggler(history: History, found: Breakdown) -> Straggler | None:
    """The straggler over the time of `found`; None if there is none, or nobody can say."""
    ranks = [r for r in found.ranks if r.steps and r.is_exchange_known]
    if len(ranks) < 2 or len(ranks) != history.world_size:
        return None
    slow = min(ranks, key=lambda r: r.per_step("waiting"))
    rest = [r for r in ranks if r is not slow]
    excess = min(r.per_step("waiting") for r in rest) - slow.per_step("waiting")
    if excess < MIN_S or excess < MIN_SHARE * slow.step_s:
        return None
    caused = _share_caused(found.waits, slow)
    if caused is not None and caused < MIN_CAUSED:
        return None
    part, part_s = _where(slow, rest, excess)
    why, facts, is_decided = _why(history, slow, rest, part, excess)
    rank = history.rank(slow.rank)
    host = rank.host if rank else ""
    share = excess / slow.step_s
    return Straggler(slow.rank, host, excess, share, caused or 0.0, part, part_s, why, facts, is_decided)


def _share_caused(waits: Waits, slow: RankParts) -> float | None:
    """Share of all waiting, at the first meeting of each step, of those to which it came last."""
    caused: Counter[int] = Counter()
    for meeting in waits.buffers or waits.gradients:
        if slow.since <= meeting.t <= slow.until:
            caused[meeting.last] += round(sum(meeting.waited(rank) for rank in meeting.came) * 1e9)
    return caused[slow.rank] / max(1, sum(caused.values())) if caused else None


def _where(slow: RankParts, rest: list[RankParts], excess: float) -> tuple[str, float]:
    """The part in which it spends more than the others, if that is most of what they wait."""
    more = {p: slow.per_step(p) - sum(r.per_step(p) for r in rest) / len(rest) for p in OWN}
    part = max(more, key=lambda p: more[p])
    return (part, more[part]) if more[part] >= 0.5 * excess else ("", 0.0)


def _why(
    history: History, slow: RankParts, rest: list[RankParts], part: str, excess: float
) -> tuple[str, tuple[str, ...], bool]:
    mine, others = _use(history, slow), [_use(history, r) for r in rest]
    rank = history.rank(slow.rank)
    assert rank is not None
    facts = [f"{PARTS[part]}: {ms(slow.per_step(part))} a step, on the others "
             f"{ms(sum(r.per_step(part) for r in rest) / len(rest))}"] if part else []  # fmt: skip
    queue = mine.queue_s - sum(o.queue_s for o in others) / len(others)
    if queue >= 0.5 * excess and mine.queue_s >= 0.1 * slow.step_s:
        facts.append(f"{ms(mine.queue_s)} of each step it is ready to run and gets no core")
        theirs = sum(o.cpu_s for o in others) / len(others)
        if mine.cpu_s - theirs >= max(MIN_S, 0.5 * theirs):
            facts.append(f"it uses {ms(mine.cpu_s - theirs)} more processor time a step than the others")
            return "it computes more than the others, and has to wait for a core for it", tuple(facts), True
        return _starved(history, rank, slow, facts), tuple(facts), True
    if mine.faults >= 1.0 and mine.faults >= 4 * max(o.faults for o in others):
        facts.append(f"{mine.faults:.0f} pages a step had to come back from the disk")
        return "its memory is swapped out", tuple(facts), True
    if part == "data":
        return _loader(mine, others, rank, facts), tuple(facts), True
    if part in ("checkpoint", "evaluate", "log"):
        return f"{OF_A_PART[0]} {PARTS[part]} than the others", tuple(facts), True
    cpu = mine.cpu_s - sum(o.cpu_s for o in others) / len(others)
    if part in ("forward", "backward", "optimizer", "copy"):
        if cpu >= 0.5 * excess:
            facts.append(f"it uses {ms(cpu)} more processor time a step than the others")
            return (
                "it computes more than the others: larger or longer batches, or work only it does",
                tuple(facts),
                True,
            )
        held = next((g for g in slow_gpus(history, slow.since, slow.until) if g.rank == slow.rank), None)
        if held is not None:
            facts.append(f"its GPU runs at {held.mhz:.0f} of {held.most_mhz} MHz, at {held.celsius} degrees")
            return f"its GPU is held back by {held.why}", tuple(facts), True
        why = "its computing takes longer, without more processor time, memory or waiting for a core: not decided"
        return (
            f"{why} (a slower or throttled device or core, or a wait inside the model)",
            tuple(facts),
            False,
        )
    if part == "python":
        doing = "computes" if cpu + max(0.0, queue) >= 0.5 * excess else "waits or sleeps"
        return f"code of the script between the calls of torch {doing} on this rank only", tuple(facts), True
    return "the time is spread over several parts: not decided", tuple(facts), False


def _starved(history: History, rank: RankHistory, slow: RankParts, facts: list[str]) -> str:
    cores, others = rank.facts.get("affinity", 0), [r for r in history.ranks if r is not rank]
    if cores and cores < min((r.facts.get("affinity", 0) for r in others), default=0):
        facts.append(f"it may run on {cores} of the cores, others on more")
        return f"it is bound to {cores} core{'s' * (cores != 1)}"
    if len(rank.samples) > 1 and rank.samples[-1].throttled_s - rank.samples[0].throttled_s > 0.5:
        facts.append("its cgroup was stopped for having used its share of the processors")
        return "its container's processor limit is used up"
    node = history.node_of(rank)
    used = others_cores(node, slow.since, slow.until)
    if used is not None and used < MIN_OTHERS:
        beside = sum(r.node == rank.node for r in history.ranks)
        facts.append(
            f"{beside} rank{'s' * (beside != 1)} of this job are on {rank.host}, and no other process that takes cores"
        )
        return "the threads and loader workers of this job take its cores"
    if used is not None:
        facts.append(f"processes that are not this job's have {used:.1f} of the cores of {rank.host}")
    return f"{OTHERS} on {rank.host} take its cores"


OTHERS = "other processes"
OF_A_PART = ("it spends more time on", "it waits for its data")
"""How it is said that one part alone is longer, and nothing lies behind it."""


def _loader(mine: _Use, others: list[_Use], rank: RankHistory, facts: list[str]) -> str:
    workers = rank.facts.get("loader_workers", 0)
    if workers and mine.batch_s:
        theirs = [o.batch_s for o in others if o.batch_s]
        if theirs:
            facts.append(
                f"its loader workers need {ms(mine.batch_s)} for a batch, the others' {ms(sum(theirs) / len(theirs))}"
            )
    return f"{OF_A_PART[1]} longer than the others: slower reading, or more or longer samples"


@dataclass(frozen=True, slots=True)
class _Use:
    """What a rank used a step."""

    cpu_s: float
    queue_s: float
    faults: float
    batch_s: float  # of loader workers, for one batch


def _use(history: History, parts: RankParts) -> _Use:
    rank = history.rank(parts.rank)
    samples = [s for s in rank.samples if parts.since <= s.t <= parts.until] if rank else []
    if len(samples) < 2:
        return _Use(0.0, 0.0, 0.0, 0.0)
    first, last = samples[0], samples[-1]

    def per_step(name: str) -> float:
        return max(0.0, getattr(last, name) - getattr(first, name)) / max(1, last.step - first.step)

    return _Use(per_step("cpu_s"), per_step("queue_s"), per_step("major_faults"), batch_s(first, last))


def batch_s(first: Sample, last: Sample) -> float:
    """What a loader worker needed for a batch; 0 = not known."""
    read = last.read - first.read
    return max(0.0, last.busy_s - first.busy_s) / read if read > 0 else 0.0
