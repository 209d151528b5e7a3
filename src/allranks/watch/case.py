"""What do the causes ask of the evidence, and how do they say it?

One Case is made per decision; it computes once who ended and why, who waits, who is absent, and where calls differ,
and holds the phrases that all verdicts share.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from allranks.watch import activity as acting
from allranks.watch import meeting, rows
from allranks.watch.evidence import Evidence, Node, Rank
from allranks.watch.stacks import is_library, shown, user_frames, user_place
from allranks.watch.verdict import Confidence, Place, Verdict, many, ranks_text, seconds

LOST_PEERS = re.compile(
    r"Connection (closed|reset) by peer|Connection reset|Timed out waiting|Application timeout caused pair closure|Broken pipe"
    r"|Socket Timeout|Read error|Write error|writev|recvValue failed|sendBytes failed|failed to recv|remote process exited"
    r"|wait timeout after|Watchdog caught collective operation timeout|NCCL communicator was aborted|unhandled system error"
    r"|caused by a remote worker crashing|failed to pass monitoredBarrier|Connection was likely closed|pair closure"
    r"|client socket has timed out|The client socket has failed"
    r"|^AR02[02] ",  # our own: another rank failed first, or left
    re.I,
)
_COMM_KINDS = (
    "RuntimeError",
    "DistBackendError",
    "DistStoreError",
    "DistNetworkError",
    "DistError",
    "ConnectionError",
    "CommError",
    "allranks.core.errors.CommError",
)
#: Phases that are expected to take long on one rank: the others' wait is no alarm for a while.
PATIENT_PHASES = ("checkpoint", "evaluate", "import", "start", "build")
STOOD_S, STOOD_LIMIT_S = 0.4, 1.45
"""What computes at the same lines at two looks so far apart is waited for less long."""
ENDS_WITHIN_S = 5.0
"""After an exception, the process is gone; else something keeps it, and that is what is to be told."""
CROWDED = 4.0
"""Processes a core that want to run, of the last minute."""
_IDLE = ("sleep", "lock", "input", "debugger", "file_lock")


@dataclass(frozen=True)
class Case:
    """The evidence, seen as the causes look at it."""

    evidence: Evidence

    @cached_property
    def failed(self) -> tuple[Rank, ...]:
        """Ranks that ended badly by themselves, earliest first; then those whose exception is on its way out."""
        ended = _by_time(r for r in self.evidence.ranks if r.exit and r.exit.failed and not r.exit.by_us)
        return (*ended, *(r for r in self.evidence.ranks if is_dying(r)))

    @cached_property
    def victims(self) -> tuple[Rank, ...]:
        """Ranks that ended because another did: their error speaks of a broken connection or a timeout."""
        return tuple(r for r in self.failed if is_victim(r))

    @cached_property
    def aborted(self) -> tuple[Rank, ...]:
        """Ranks that gloo or NCCL aborted as they communicated: what they met there did not fit."""
        return tuple(r for r in self.failed if r not in self.victims and is_comm_abort(r))

    @cached_property
    def roots(self) -> tuple[Rank, ...]:
        """Ranks that ended badly of their own, earliest first."""
        return tuple(r for r in self.failed if r not in self.victims and r not in self.aborted)

    @cached_property
    def finished(self) -> tuple[Rank, ...]:
        """Ranks whose script came to its end well."""
        return tuple(
            r for r in self.evidence.ranks if r.exit is not None and not r.exit.failed and not r.exit.by_us
        )

    @cached_property
    def is_end_to_come(self) -> bool:
        """Whether ranks failed a moment ago that only lost a peer, and nothing is known of its end yet."""
        is_new = any(r.record is not None and r.record.phase_s < ENDS_WITHIN_S for r in self.failed)
        if self.evidence.trigger in ("exit", "lost") or not (is_new or self.evidence.trigger == "dying"):
            return False
        are_victims = all(r in self.victims for r in self.failed)
        return are_victims and not self.finished and not any(has_left(r) for r in self.evidence.ranks)

    @cached_property
    def waits(self) -> dict[int, meeting.Wait]:
        """Ranks that wait inside communication, or died waiting."""
        found = meeting.waits(self.evidence)
        for rank in (*self.victims, *self.aborted):
            if (wait := meeting.last_wait(rank)) is not None:
                found[rank.rank] = wait
        return found

    def waiting_for(self, ranks: Sequence[Rank]) -> list[int]:
        """Other ranks that wait in what cannot end without one of these: calls of a group of ranks need no other rank."""
        numbers = {r.rank for r in ranks}
        size = self.evidence.world_size
        return [
            n for n, w in self.waits.items() if n not in numbers and meeting.needed({n: w}, size) & numbers
        ]

    @cached_property
    def absent(self) -> tuple[Rank, ...]:
        """Ranks that others wait for and that do not wait themselves."""
        needed = meeting.needed(self.waits, self.evidence.world_size)
        return tuple(r for r in self.evidence.ranks if r.rank in needed and r.rank not in self.waits)

    @cached_property
    def stuck(self) -> tuple[Rank, ...]:
        """Absent ranks that are alive."""
        return tuple(r for r in self.absent if r.is_alive)

    @cached_property
    def differences(self) -> tuple[meeting.Difference, ...]:
        """Where the ranks' calls differ."""
        return meeting.differences(self.evidence)

    def activity(self, rank: Rank) -> acting.Activity:
        """What a rank's main thread does."""
        return acting.activity(rank)

    def is_early(self, rank: Rank, doing: acting.Activity) -> bool:
        """Whether this rank may well come by itself: it is at something that takes its time, and has not taken it yet."""
        waited = self.waited_s([rank.rank])
        if waited is None:
            return False
        if waited < 0.9:
            return True
        if self.evidence.trigger == "asked":
            return False
        record = rank.record
        limit, wants_core = 0.0, doing.is_busy or rank.state == "R"
        if wants_core:
            is_at_work = rank.is_moving or (doing.kind == "loop" and acting.calls_something(doing.where))
            limit = 10.0 if is_at_work else STOOD_LIMIT_S if rank.stood_s >= STOOD_S else 2.0
        if is_going_on(rank) or (rank.is_moving and not rank.stacks):
            limit = 30.0
        if rank.host_load > CROWDED and record is not None and record.tick_s > 1.0:
            limit = max(limit, 5.5)  # starved, or in C code that holds the GIL: a longer look tells
        if record is not None and record.median_step_s == 0.0:
            # First steps: workers start, kernels compile, caches fill; but who sleeps or waits for a lock does none of it.
            limit = 20.0 if wants_core else STOOD_LIMIT_S if doing.kind in _IDLE else 8.0
        if rank.is_by_row:
            limit = max(limit, 10.0)  # its node did not answer in time: the next look may tell what it does
        if record is not None and record.phase in PATIENT_PHASES:
            limit = 30.0
        if wants_core and rank.host_load > CROWDED:
            # What it does with a core of its own takes it so much longer; for a GIL that is held the load is in the limit already.
            limit *= rank.host_load / (CROWDED if doing.kind == "gil" else 2)
        return waited < limit

    def doing(self, *kinds: str) -> list[tuple[Rank, acting.Activity]]:
        """Absent ranks that do one of these things, and have done so for long enough to be spoken of."""
        pairs = [(r, self.activity(r)) for r in self.stuck]
        return [(r, a) for r, a in pairs if a.kind in kinds and not self.is_early(r, a)]

    def node_of(self, rank: Rank) -> Node | None:
        """The rank's node."""
        return next((n for n in self.evidence.nodes if n.node_rank == rank.node_rank), None)

    # --- phrases ---

    def who(self, ranks: Sequence[Rank]) -> str:
        """'rank 1 on gpu-a', 'ranks 0-3'."""
        hosts = {r.host for r in ranks}
        text = ranks_text([r.rank for r in ranks])
        return f"{text} on {next(iter(hosts))}" if len(hosts) == 1 and next(iter(hosts)) else text

    def at(self, place: Place | None) -> str:
        """'train.py:27 in main:  loss.backward()'."""
        short = shown(place, self.evidence.cwd)
        return short.text() if short else ""

    def at_short(self, place: Place | None) -> str:
        """'train.py:27 loss.backward()'."""
        short = shown(place, self.evidence.cwd)
        return f"{short.short()} {short.code}".strip() if short else ""

    def frames(self, frames: Sequence[Place], most: int = 3) -> tuple[str, ...]:
        """The user's lines of a stack, innermost first; of a library's if there are none of the user's."""
        own = user_frames(frames)[:most] or tuple(p for p in (user_place(frames),) if p)
        return tuple(self.at(p) for p in own)

    def stands_at(self, rank: Rank) -> tuple[str, ...]:
        """The user's lines at which the main thread stands: from its stack, else from its record."""
        stack = next((s for s in rank.stacks if s.is_main), None)
        lines = self.frames(stack.frames) if stack else ()
        if not lines and rank.record is not None and rank.record.where is not None:
            lines = (self.at(rank.record.where),)
        return lines

    def others(self, but: Iterable[int] = ()) -> str:
        """What the waiting ranks wait in: 'rank 0 waits in the gradient all-reduce of step 31 (train.py:24 loss.backward())'."""
        left = set(but)
        groups: dict[tuple[str, str], list[int]] = {}
        for number, wait in sorted(self.waits.items()):
            if number not in left:
                groups.setdefault(self._wait_text(number, wait), []).append(number)
        parts = [
            f"{ranks_text(ranks)} {many(ranks, 'waits', 'wait')} in {text}" + (f" ({place})" if place else "")
            for (text, place), ranks in groups.items()
        ]
        return "; ".join(parts)

    def _wait_text(self, number: int, wait: meeting.Wait) -> tuple[str, str]:
        rank = self.evidence.rank(number)
        record = rank.record if rank else None
        place = wait.call.where if wait.call is not None else record.where if record else None
        if place is None and rank is not None and rank.failure is not None:
            place = user_place(rank.failure.frames)
        if place is None and rank is not None:
            stack = next((s for s in rank.stacks if s.is_main), None)
            place = user_place(stack.frames) if stack else None
        is_counted = record is not None and (record.step > 0 or record.is_probed)
        step = f" of step {record.step}" if record and is_counted and wait.kind == "gradients" else ""
        return wait.text() + step, self.at_short(place)

    def waits_for(self, ranks: Sequence[Rank]) -> str:
        """'; rank 0 waits for it' for the end of a first line, or nothing."""
        waiting = [r for r in self.waits if r not in {x.rank for x in ranks}]
        if not waiting:
            return ""
        return f"; {ranks_text(waiting)} {many(waiting, 'waits', 'wait')} for {'it' if len(ranks) == 1 else 'them'}"

    def step(self, ranks: Sequence[Rank]) -> int | None:
        """The step of the first of these ranks that has a record and is past its first step."""
        return next(
            (
                r.record.step
                for r in ranks
                if r.record is not None and (r.record.step or r.record.median_step_s)
            ),
            None,
        )

    def waited_s(self, but: Iterable[int] = ()) -> float | None:
        """How long the others have waited, at most."""
        left = set(but)
        return max((w.age_s for n, w in self.waits.items() if n not in left), default=None)

    def verdict(
        self,
        code: str,
        name: str,
        what: str,
        ranks: Sequence[Rank],
        *,
        where: Sequence[str] | None = None,
        facts: Sequence[str] = (),
        fix: str = "",
        since_s: float | None = None,
        others: str | None = None,
        confidence: Confidence = "certain",
        can_go_on: bool = True,
    ) -> Verdict:
        """A verdict about these culprits; what is not given is read from the evidence."""
        numbers = [r.rank for r in ranks]
        if since_s is None and self.evidence.trigger not in ("exit", "dying"):
            ages = [r.record.phase_s for r in ranks if r.record is not None and r.is_alive]
            since_s = self.waited_s(numbers) if self.waits else max(ages, default=None)
        return Verdict(
            code=code,
            name=name,
            what=what,
            ranks=tuple(numbers),
            hosts=tuple(sorted({r.host for r in ranks})),
            where=tuple(where) if where is not None else (self.stands_at(ranks[0]) if ranks else ()),
            since_s=since_s,
            step=self.step(ranks),
            others=self.others(numbers) if others is None else others,
            facts=tuple(f for f in facts if f),
            fix=fix,
            confidence=confidence,
            can_go_on=can_go_on,
        )


def stuck_at(
    case: Case,
    code: str,
    name: str,
    found: Sequence[tuple[Rank, acting.Activity]],
    words: str,
    *,
    facts: Sequence[str] = (),
    fix: str = "",
    confidence: Confidence = "certain",
) -> Verdict:
    """The verdict on ranks that are alive, do something else, and do not come: 'rank 1 on h <words>; rank 0 waits for it'."""
    ranks = [r for r, _ in found]
    seen = [f"process {ranks[0].pid} is in state {ranks[0].state or '?'}"]
    if ranks[0].wchan and ranks[0].state != "R":
        seen[0] += f", in the kernel's {ranks[0].wchan}"
    if ranks[0].record is not None:
        seen[0] += f"; phase {ranks[0].record.phase}{span(ranks[0].record.phase_s)}"
    return case.verdict(
        code,
        name,
        f"{case.who(ranks)} {words if len(ranks) == 1 else _of_many(words)}{case.waits_for(ranks)}",
        ranks,
        facts=[*facts, *seen],
        fix=fix,
        confidence=confidence,
    )


def _of_many(words: str) -> str:
    """'computes on and does not come' as it is said of several ranks."""
    first, _, rest = words.partition(" ")
    first = {"is": "are", "has": "have", "does": "do"}.get(first, first.removesuffix("s"))
    return f"{first} {rest}".strip().replace(" and does not", " and do not")


def is_victim(rank: Rank) -> bool:
    """Whether the rank's own last words say that it only lost its peers."""
    failure = rank.failure
    words = rank.record.exception if rank.record else None
    if failure is not None:
        if failure.kind == "ConnectionError" and not any(is_of_torch(f.file) for f in failure.frames):
            return False  # requests has one of this name, too: a download of the script's own
        return failure.kind in _COMM_KINDS and bool(LOST_PEERS.search(failure.message))
    if words is not None:
        return words.kind in _COMM_KINDS and bool(LOST_PEERS.search(words.message))
    if rank.exit is not None and rank.exit.signal == 6:
        thrown = next((i for i, line in enumerate(rank.output) if "gloo::IoException" in line), None)
        # "terminate called after throwing an instance of ..." and "  what():  ..." are two lines.
        return thrown is not None and any(LOST_PEERS.search(x) for x in rank.output[thrown : thrown + 2])
    return False


def is_of_torch(file: str) -> bool:
    """Whether a file is of what ranks communicate with."""
    return is_library(file) and ("/torch/distributed/" in file or "/allranks/" in file)


def is_dying(rank: Rank) -> bool:
    """Whether its script has ended badly, and only the interpreter's own end is to come."""
    return rank.exit is None and rank.record is not None and rows.is_dying(rank.record)


def has_left(rank: Rank) -> bool:
    """Whether it has destroyed the group and waits at a line of its own: it is not on its way out, as after an exception."""
    record = rank.record
    return (
        rank.is_alive
        and rank.state == "S"
        and bool(rank.stacks)
        and not rank.is_cleaning_up
        and record is not None
        and record.is_destroyed
        and (record.exit_kind, record.phase) == ("", "python")
        and record.phase_s >= 0.3
    )


def is_on_its_way_out(rank: Rank) -> bool:
    """Whether it has come to an `except` or `finally` a moment ago: what it raises is not known yet."""
    return (
        rank.is_alive
        and rank.is_cleaning_up
        and rank.record is not None
        and rank.record.phase_s < ENDS_WITHIN_S
    )


def is_going_on(rank: Rank) -> bool:
    """Whether the rank is at work that changes: it came to another phase a moment ago, or runs a model outside of DDP."""
    record = rank.record
    if record is None or record.phase not in ("python", "data", "checkpoint", "evaluate", "log"):
        return False
    is_at_work = rank.main_cpu_share + rank.run_queue_share > 0.3 or rank.state == "R"
    return is_at_work and (rank.runs_model or record.phase_s < 0.8)


def is_comm_abort(rank: Rank) -> bool:
    """Whether gloo or NCCL called abort() in this rank, which then died in a collective."""
    if rank.exit is None or rank.exit.signal != 6:
        return False
    said = any("gloo" in line or "nccl" in line.lower() or "c10d" in line for line in rank.output)
    inside = rank.record is not None and (
        rank.record.inside is not None or rank.record.phase in meeting.DDP_PHASES
    )
    return (said and inside) or any("gloo::EnforceNotMet" in line for line in rank.output)


def _by_time(ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    return tuple(sorted(ranks, key=lambda r: (r.exit.at_s if r.exit else 0.0, r.rank)))


def span(value: float | None) -> str:
    """' for 3.1 s', or nothing."""
    return f" for {seconds(value)}" if value is not None else ""
