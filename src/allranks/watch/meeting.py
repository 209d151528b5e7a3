"""Where do the ranks stand against each other: who waits in which collective, and who has not come to it?

Pure arithmetic on records. A rank waits when it is inside a call of its own, or inside DDP's forward, backward or
construction with no work of its own to do. Ranks meet when they issue the same collective at the same sequence number of the
same process group; the number counts DDP's collectives too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from allranks.watch.evidence import Call, Evidence, Rank, Record

#: Phases in which DDP's own collectives are waited for, without a call of the user's.
DDP_PHASES = ("build", "forward", "backward")
#: Calls that do not need all ranks of the group at the same number.
POINT_TO_POINT = (
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "send_object_list",
    "recv_object_list",
)
_DISTRIBUTED_FILES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/allranks/comm/")
_WAITING_FILES = {
    "build": _DISTRIBUTED_FILES,
    "forward": _DISTRIBUTED_FILES,
    "backward": (*_DISTRIBUTED_FILES, "/torch/autograd/graph.py", "/torch/autograd/__init__.py"),
}
_NO_TENSOR = ("barrier", "monitored_barrier", "new_group", "destroy_process_group")


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank that waits inside communication."""

    rank: int
    kind: str
    """'call' (the user's own), 'gradients', 'buffers', 'build', 'init'; 'lost': it died in some communication."""
    seq: int
    """Collectives it has issued in the group, this one included; -1 = not known."""
    age_s: float
    call: Call | None = None
    group: str = ""

    def text(self) -> str:
        """'the all_reduce of [64] float32', 'the gradient all-reduce'."""
        if self.call is not None:
            return "the " + call_text(self.call)
        return {
            "gradients": "the gradient all-reduce of DDP's backward",
            "buffers": "DDP's forward (its buffers are broadcast from rank 0)",
            "build": "the construction of DDP",
            "init": "init_process_group",
            "lost": "communication that was broken off",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Difference:
    """Calls at the same place of the same sequence that are not the same."""

    what: str
    """'op', 'shape', 'dtype', 'root', 'reduce_op', 'line'."""
    seq: int
    calls: dict[int, Call]
    """rank -> its call; a rank that was in DDP's own communication instead is left out."""
    odd: tuple[int, ...]
    """The minority; both where there are two ranks."""


def wait_of(rank: Rank) -> Wait | None:
    """What this rank waits in, if it waits for other ranks."""
    record = rank.record
    if record is None or not rank.is_alive:
        return None
    if (call := record.inside) is not None and not (call.is_async and not call.was_waited):
        return Wait(rank.rank, "call", call.seq + 1 if call.seq >= 0 else -1, call.age_s, call, call.group)
    if record.phase == "init":
        return Wait(rank.rank, "init", -1, record.phase_s)
    if record.phase in DDP_PHASES and not is_working(rank):
        kind = {"backward": "gradients", "forward": "buffers", "build": "build"}[record.phase]
        return Wait(rank.rank, kind, record.group_seq, record.phase_s)
    return None


def is_working(rank: Rank) -> bool:
    """Whether the main thread does something itself: runs, is stopped, or sleeps at a Python line of its own."""
    if rank.state in ("T", "t", "D"):
        return True
    if rank.state == "R" or rank.main_cpu_share + rank.run_queue_share > 0.3:
        return True
    return is_elsewhere(rank)


def is_elsewhere(rank: Rank) -> bool:
    """Whether its innermost frame shows that it is at something else than DDP's own communication: an import, a layer, a sleep."""
    stack = next((s for s in rank.stacks if s.is_main), None)
    if stack is None or not stack.frames or rank.record is None:
        return False
    top = stack.frames[0].file
    return not any(part in top for part in _WAITING_FILES.get(rank.record.phase, ()))


def waits(evidence: Evidence) -> dict[int, Wait]:
    """All ranks that wait inside communication."""
    found = {r.rank: wait_of(r) for r in evidence.ranks}
    return {rank: wait for rank, wait in found.items() if wait is not None}


def position(record: Record) -> int:
    """Collectives issued in the default group so far, as far as known."""
    inside = record.inside
    known = [record.group_seq]
    if inside is not None and not inside.members and inside.seq >= 0:
        known.append(inside.seq + 1)
    return max(known)


def needed(waiting: dict[int, Wait], world_size: int) -> set[int]:
    """The ranks that these waits need."""
    ranks: set[int] = set()
    for wait in waiting.values():
        members = wait.call.members if wait.call is not None else ""
        ranks |= {int(m) for m in members.split(",")} if members else set(range(world_size))
    return ranks


_BACKWARDS = ("_engine_run_backward", "backward_through_memory")  # torch's, and that of wrap/straight.py


def last_wait(rank: Rank) -> Wait | None:
    """What a rank waited in when its communication failed."""
    record = rank.record
    if record is None:
        return None
    failed = next((c for c in reversed(record.calls) if c.has_failed or c.is_inside), None)
    if failed is not None:
        return Wait(
            rank.rank, "call", failed.seq + 1 if failed.seq >= 0 else -1, failed.age_s, failed, failed.group
        )
    kind = {"backward": "gradients", "forward": "buffers", "build": "build", "init": "init"}.get(record.phase)
    if kind is None and rank.failure is not None:
        in_backward = any(f.function in _BACKWARDS for f in rank.failure.frames)
        kind = "gradients" if in_backward else "lost"
    return Wait(rank.rank, kind, record.group_seq, 0.0) if kind else None


def call_text(call: Call) -> str:
    """'all_reduce of [64] float32', 'broadcast of [8] float32 from rank 0'."""
    text = call.op
    if call.op not in _NO_TENSOR and (call.shape or call.numel):
        many = f"{call.num_tensors} tensors, " if call.num_tensors > 1 else ""
        text += f" of {many}{list(call.shape)} {call.dtype}".rstrip()
    if call.root >= 0:
        text += f" {_ROOT_WORD.get(call.op, 'with root')} rank {call.root}"
    if call.reduce_op and call.reduce_op != "SUM":
        text += f" ({call.reduce_op})"
    return text


_ROOT_WORD = {
    "broadcast": "from",
    "broadcast_object_list": "from",
    "scatter": "from",
    "reduce": "to",
    "gather": "to",
}


def differences(evidence: Evidence) -> tuple[Difference, ...]:
    """Where calls at the same number of the same group differ, earliest first.

    Only numbers that all ranks' records still hold are compared, and only calls whose number is known.
    """
    rings = {r.rank: _by_number(r.record) for r in evidence.ranks if r.record is not None and r.record.calls}
    found: list[Difference] = []
    for key in sorted({k for ring in rings.values() for k in ring}, key=lambda k: k[1]):
        calls = {rank: ring[key] for rank, ring in rings.items() if key in ring}
        if len(calls) > 1 and (what := first_difference(list(calls.values()))):
            found.append(Difference(what, key[1], calls, odd_ones(calls, what)))
    return tuple(found)


def _by_number(record: Record) -> dict[tuple[str, int], Call]:
    out: dict[tuple[str, int], Call] = {}
    for call in record.calls:
        if call.seq >= 0 and call.op not in POINT_TO_POINT and not call.op.startswith("wait("):
            out.setdefault((call.group, call.seq), call)
    return out


def first_difference(calls: list[Call]) -> str:
    """The first property in which these calls are not equal; empty if they are the same."""
    for what in ("op", "members", "dtype", "shape", "root", "reduce_op", "line"):
        if len({key_of(c, what) for c in calls}) > 1:
            return what
    return ""


def key_of(call: Call, what: str) -> object:
    """The value of a property, as it must be equal on all ranks."""
    if what == "shape":
        # Ranks may send and receive different things where a root is named, so only sizes that must meet count.
        return (
            ()
            if call.op in ("scatter", "gather", "all_to_all", "all_to_all_single")
            else (call.numel, call.num_tensors)
        )
    if what == "dtype":
        return "" if call.op in _NO_TENSOR or "object" in call.op else call.dtype
    if what == "line":
        return call.where and (call.where.file.rsplit("/", 1)[-1], call.where.line)
    return getattr(call, what)


def odd_ones(calls: dict[int, Call], what: str) -> tuple[int, ...]:
    """The ranks that differ from the majority; all of them where there is none."""
    groups = Counter(key_of(c, what) for c in calls.values())
    (most, count), *rest = groups.most_common()
    if rest and rest[0][1] == count:
        return tuple(sorted(calls))
    return tuple(sorted(r for r, c in calls.items() if key_of(c, what) != most))


def standings(evidence: Evidence, waiting: dict[int, Wait]) -> list[tuple[int, ...]]:
    """The waiting ranks, grouped by what they wait in; ranks in one group may meet each other."""
    groups: dict[object, list[int]] = {}
    for number, wait in sorted(waiting.items()):
        if wait.call is not None:
            key: object = (
                "call",
                wait.group,
                wait.seq,
                *(key_of(wait.call, w) for w in ("op", "dtype", "shape", "root", "reduce_op")),
            )
        else:
            key = (wait.kind, wait.seq if wait.kind == "buffers" else None)
        groups.setdefault(key, []).append(number)
    return [tuple(ranks) for ranks in groups.values()]
