"""AR207 loader-worker-died: a process of the data loader ended."""

from __future__ import annotations

import re
from itertools import takewhile

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.stacks import is_library, parse_traceback
from allranks.watch.verdict import Place, Verdict

CODE, NAME = "AR207", "loader-worker-died"

_GONE = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) (exited unexpectedly|is killed by signal: [\w ]+)"
)
_CAUGHT = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)")

_LOST = ("ConnectionResetError", "ConnectionRefusedError", "EOFError", "BrokenPipeError", "FileNotFoundError")


def find(case: Case) -> Verdict | None:
    for rank in case.roots:
        text = rank.failure.message + "\n" + "\n".join(rank.failure.text) if rank.failure else ""
        if caught := _CAUGHT.search(text):
            return _raised(case, rank, caught[1], caught[2])
        if gone := _GONE.search(text):
            return _killed(case, rank, gone[1].strip(), gone[2])
        if rank.failure and rank.failure.kind in _LOST and _is_on_its_way(rank.failure.frames):
            # A batch on its way from a worker that died: the connection is noticed before the worker's end.
            return _killed(case, rank, "?", "its connection to the loader was lost")
    return _dead_but_unnoticed(case)


def _is_on_its_way(frames: tuple[Place, ...]) -> bool:
    """Whether the loader failed as it took a batch from a worker: without workers, its lines are around those of the data set."""
    inner = [f.file for f in takewhile(lambda f: not f.file.endswith("utils/data/dataloader.py"), frames)]
    is_of_loader = len(inner) < len(frames)
    return is_of_loader and all(is_library(f) and not f.endswith("utils/data/_utils/fetch.py") for f in inner)


def _raised(case: Case, rank: Rank, kind: str, number: str) -> Verdict:
    text = list(rank.failure.text) if rank.failure else []
    start = next((i for i, line in enumerate(text) if "Original Traceback" in line), 0)
    inner = parse_traceback(
        ["Traceback (most recent call last):" if "Original Traceback" in x else x for x in text[start:]]
    )
    message = inner.message.split("\n")[0] if inner else ""
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([rank])}: loader worker {number} raised {kind}{': ' + message if message else ''}",
        [rank],
        where=case.frames(inner.frames) if inner else None,
        facts=[
            "the exception is one of the data set's, in a worker process; the training loop only passes it on"
        ],
        fix="look at the sample: run the data set with num_workers=0 over the indices of this rank",
        can_go_on=False,
    )


def _killed(case: Case, rank: Rank, pids: str, how: str) -> Verdict:
    node = case.node_of(rank)
    facts = [f"DataLoader worker (pid {pids}) {how}"]
    fix = "a worker that ends without a word was killed: by the OOM killer (fewer workers, smaller batches) or by somebody"
    if "Bus error" in how or (node and node.shm_free_bytes is not None and node.shm_free_bytes < 64 << 20):
        fix = "/dev/shm is too small for the batches in flight: raise it (docker --shm-size=8g), or lower num_workers x prefetch_factor"
        if node and node.shm_size_bytes:
            facts.append(
                f"/dev/shm has {(node.shm_free_bytes or 0) / 1e6:.0f} MB free of {node.shm_size_bytes / 1e6:.0f} MB"
            )
    if logged := rank.notes.get("oom_worker"):
        facts.append(f"the kernel's log: process {pids} killed: {logged}")
        fix = "memory ran out: use fewer loader workers, smaller batches, or give the job more memory"
    elif node and node.oom_kills > 0:
        facts.append(
            f"the kernel counts {node.oom_kills} kill(s) for memory on {node.host} since the job began"
        )
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([rank])}: a loader worker (pid {pids}) died: {how}",
        [rank],
        where=case.frames(rank.failure.frames) if rank.failure else None,
        facts=facts,
        fix=fix,
        can_go_on=False,
    )


def _dead_but_unnoticed(case: Case) -> Verdict | None:
    """A rank that waits for its loader although no worker is left."""
    for rank in case.stuck:
        dead = [w for w in rank.workers if w.is_loader and w.state in ("", "Z", "X")]
        alive = [w for w in rank.workers if w.is_loader and w.state not in ("", "Z", "X")]
        if rank.record and rank.record.phase == "data" and dead and not alive:
            return case.verdict(
                CODE,
                NAME,
                f"{case.who([rank])} waits for its data loader, and none of its {len(dead)} worker(s) lives any more",
                [rank],
                facts=[f"loader worker (pid {', '.join(str(w.pid) for w in dead)}) is gone"],
                fix="see what killed the workers (memory, /dev/shm); the loader cannot go on",
                can_go_on=False,
            )
    return None
