"""How is evidence taken from the ranks of this node?

Everything here has a deadline, needs no help of the sick process beyond a signal handler that faulthandler runs without the
GIL, and leaves the process as it was. About 0.25 s for a node, whatever the number of ranks: they are asked together.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from allranks.record import page
from allranks.watch import proc
from allranks.watch.evidence import Node, Rank, Stack, Worker
from allranks.watch.file_locks import file_lock_of
from allranks.watch.reading import guard_of, loop_of, record_of, stack_with_code
from allranks.watch.stacks import (
    is_inside,
    main_stack,
    parse_faulthandler,
    parse_pyspy,
    runs_model,
    user_frames,
)
from allranks.watch.store import with_store
from allranks.watch.tracing import with_notes, with_numbers
from allranks.watch.verdict import Place

STACK_DEADLINE_S = 0.25
PYSPY_DEADLINE_S = 0.6
SAMPLE_S = 0.12
"""Between two looks at processor time and stacks."""
LOOKS, LOOKS_APART_S = 4, 0.013
"""More stacks of a rank that uses the processor."""
SNAPSHOT_TRIES = 5  # readings of all pages, until two agree
_CUT_SHORT = ("sys_pause", "sigsuspend")
"""What the kernel calls waits that any signal ends for good."""


@dataclass(frozen=True, slots=True)
class Target:
    """A process to take evidence from."""

    pid: int
    page: page.Record | None


def page_of(folder: Path | None, pid: int) -> page.Record | None:
    """The record of a process, if it has one."""
    if folder is None:
        return None
    try:
        return page.read_page(folder / f"{pid}.page")
    except (OSError, page.NotARecord, ValueError):
        return None


def take(
    ranks: Sequence[Rank],
    folder: Path | None,
    *,
    with_sockets: bool = False,
    with_models: bool = False,
    sample_s: float = SAMPLE_S,
) -> tuple[Rank, ...]:
    """The evidence of these live ranks (of which rank, pid, host and node are filled in), all at once.

    Args:
        ranks: What to look at.
        folder: Where the record pages are.
        with_sockets: Look at connections to other hosts, too (5 ms for each rank).
        with_models: Read what each parameter of the model is.
        sample_s: How long processor time is measured.
    """
    pages = {r.pid: page_of(folder, r.pid) for r in ranks}
    workers = {r.pid: _worker_pids(r.pid, pages[r.pid]) for r in ranks}
    everybody = [
        Target(p, pages.get(p) or page_of(folder, p)) for r in ranks for p in (r.pid, *workers[r.pid])
    ]
    before = {t.pid: proc.times(t.pid) for t in everybody}
    stacks = take_stacks(everybody)
    time.sleep(max(0.0, sample_s))
    after = {t.pid: proc.times(t.pid) for t in everybody}
    busy = [t for t in everybody if t.pid in pages and proc.shares(before[t.pid], after[t.pid])[0] > 0.3]
    again = _stacks_later(busy)
    newest = pages_at_one_moment(folder, list(pages))
    stacks |= _stacks_again(everybody, newest)
    stacks |= _from_outside([p for p in pages if _waits_for_a_thread(p, stacks.get(p, ("", ())))])
    by_pid = {t.pid: t for t in everybody}
    out = []
    for rank in ranks:
        span = before[rank.pid], after[rank.pid]
        taken = _rank(rank, newest.get(rank.pid), stacks, again, span, with_models)
        kids = tuple(_worker(by_pid[p], stacks, (before[p], after[p])) for p in workers[rank.pid])
        if taken.record is not None and (own := newest.get(rank.pid)):
            taken = replace(taken, record=with_notes(taken.record, own))
        taken = replace(taken, workers=kids, sockets=proc.sockets(rank.pid) if with_sockets else ())
        out.append(with_store(replace(taken, file_lock=file_lock_of(taken))))
    return tuple(out)


def take_quietly(ranks: Sequence[Rank], folder: Path | None) -> tuple[Rank, ...]:
    """What the records and notes of these ranks say, also of ended ones; no rank is signalled, and it takes a few ms."""
    out = []
    for rank in ranks:
        found = page_of(folder, rank.pid)
        if found is not None:
            record = with_numbers(record_of(found, with_model=True), found)
            out.append(replace(rank, state=proc.state(rank.pid), record=record))
    return tuple(out)


def pages_at_one_moment(folder: Path | None, pids: Sequence[int]) -> dict[int, page.Record]:
    """The records of these processes as they were at one moment: all are read until two readings agree.

    Processes that go on all the while are given as last read: they do not hang.
    """
    before: dict[int, page.Record] = {}
    for _ in range(SNAPSHOT_TRIES):
        found = {pid: own for pid in pids if (own := page_of(folder, pid)) is not None}
        if {p: r.marks for p, r in found.items()} == {p: r.marks for p, r in before.items()}:
            return found
        before = found
    return before


def _stacks_later(busy: Sequence[Target]) -> list[dict[int, tuple[str, tuple[Stack, ...]]]]:
    """More stacks of ranks that use the processor, a moment apart: does the work change?"""
    found = []
    for _ in range(LOOKS if busy else 0):
        time.sleep(LOOKS_APART_S)
        found.append(take_stacks(busy, is_second=True))
    return found


def _stacks_again(
    targets: Sequence[Target], newest: dict[int, page.Record]
) -> dict[int, tuple[str, tuple[Stack, ...]]]:
    """New stacks of the ranks that have gone on since theirs was taken; none where they do not stand still for one."""
    moved = [
        Target(t.pid, newest[t.pid])
        for t in targets
        if t.pid in newest and t.page is not None and t.page.marks != newest[t.pid].marks
    ]
    taken = take_stacks(moved) if moved else {}
    stood: dict[int, tuple[str, tuple[Stack, ...]]] = {}
    for target in moved:
        assert target.page is not None
        now = page_of(Path(target.page.path).parent, target.pid)
        has_stood = now is not None and now.marks == target.page.marks
        stood[target.pid] = taken.get(target.pid, ("", ())) if has_stood else ("", ())
    return stood


def take_stacks(
    targets: Iterable[Target], *, is_second: bool = False
) -> dict[int, tuple[str, tuple[Stack, ...]]]:
    """pid -> (how, stacks): by signal where the process can answer, else by py-spy from outside."""
    asked: dict[int, tuple[Path, int]] = {}
    outside: list[int] = []
    for target in targets:
        letter = proc.state(target.pid)
        if letter in ("", "Z", "X"):
            continue
        found = target.page
        if found is not None and _can_answer(letter, found, target.pid):
            path = page.side_file(found, ".stack")
            size = path.stat().st_size if path.exists() else 0
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target.pid, found.stack_signal)
                asked[target.pid] = (path, size)
        elif letter == "R" or not is_second:
            outside.append(target.pid)
    out = _answers(asked)
    silent = [] if is_second else [p for p in asked if p not in out]
    return {**out, **_from_outside([*outside, *silent])}


def _can_answer(letter: str, found: page.Record, pid: int) -> bool:
    """Whether a signal may ask it: it has the handler, sleeps, and not in C code that holds the GIL.

    A signal would cut short a C call such as sleep(3), or pause(), and let the rank go on. And one that meets the interpreter between two
    instructions can end the process: CPython 3.11 links a frame in before it is filled in, which faulthandler then reads.
    """
    is_frozen = found.tick_ns > 0 and time.monotonic_ns() - found.tick_ns > 1_000_000_000
    return (
        letter == "S"
        and not is_frozen
        and not any(call in proc.wchan(pid) for call in _CUT_SHORT)
        and found.stack_signal > 0
        and proc.catches(pid, found.stack_signal)
    )


def _waits_for_a_thread(pid: int, taken: tuple[str, tuple[Stack, ...]]) -> bool:
    """Whether its main thread told that it waits, and not in torch: what the other threads do matters then."""
    main = main_stack(taken[1])
    if taken[0] != "signal" or main is None or not main.frames or not proc.wchan(pid).startswith("futex"):
        return False
    return "/torch/" not in main.frames[0].file and "/allranks/" not in main.frames[0].file


def _answers(asked: dict[int, tuple[Path, int]]) -> dict[int, tuple[str, tuple[Stack, ...]]]:
    """What the processes wrote after the sizes given, once each file has stopped growing."""
    out: dict[int, tuple[str, tuple[Stack, ...]]] = {}
    sizes = dict.fromkeys(asked, -1)
    deadline = time.monotonic() + STACK_DEADLINE_S
    while len(out) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.004)
        for pid, (path, start) in asked.items():
            if pid in out:
                continue
            size = path.stat().st_size if path.exists() else 0
            if size > start and size == sizes[pid]:
                with path.open("rb") as file:
                    file.seek(start)
                    _, stacks = parse_faulthandler(file.read().decode("utf-8", "replace"))
                out[pid] = ("signal", _without_ours(stacks))
            sizes[pid] = size
    return out


def _from_outside(pids: Sequence[int]) -> dict[int, tuple[str, tuple[Stack, ...]]]:
    if not pids:
        return {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        texts = list(pool.map(py_spy, pids))
    return {
        pid: ("py-spy", _without_ours(parse_pyspy(text)))
        for pid, text in zip(pids, texts, strict=True)
        if text
    }


def py_spy(pid: int, *options: str) -> str:
    """What py-spy says of a process without stopping it, as JSON; empty if it cannot."""
    tool = Path(sys.executable).parent / "py-spy"
    if (found := str(tool) if tool.exists() else shutil.which("py-spy")) is None:
        return ""
    try:
        done = subprocess.run(
            [found, "dump", "--nonblocking", "--json", *options, "--pid", str(pid)],
            capture_output=True,
            timeout=PYSPY_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def _without_ours(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Without the threads that the record keeps in the process."""
    kept = [
        s
        for s in stacks
        if not (s.frames and not s.is_main and is_inside(s.frames, "/allranks/record/process.py"))
    ]
    return tuple(s for s in kept if s.is_main or not _is_record_thread(s))


def _is_record_thread(stack: Stack) -> bool:
    inner = [f for f in stack.frames if not f.file.endswith("/threading.py")]
    return bool(inner) and all("/allranks/record/" in f.file for f in inner)


def _rank(
    rank: Rank,
    newest: page.Record | None,
    stacks: dict[int, tuple[str, tuple[Stack, ...]]],
    again: list[dict[int, tuple[str, tuple[Stack, ...]]]],
    span: tuple[proc.Times | None, proc.Times | None],
    with_models: bool,
) -> Rank:
    letter, waits_in = proc.state(rank.pid), proc.wchan(rank.pid)
    how, found = stacks.get(rank.pid, ("", ()))
    has_moved = _has_moved(newest) or stacks.get(rank.pid) == ("", ())
    if has_moved:  # what was seen is of several moments: nothing of it tells what the rank does now
        found, waits_in = (), ""
    found = tuple(stack_with_code(s) for s in found)
    share, main_share, waited = proc.shares(*span)
    main = main_stack(found)
    frames = user_frames(main.frames) if main else ()
    later = [s for one in again if rank.pid in one and (s := main_stack(one[rank.pid][1])) is not None]
    return replace(
        rank,
        state=letter,
        wchan=waits_in,
        cpu_share=round(share, 3),
        main_cpu_share=round(main_share, 3),
        run_queue_share=round(waited, 3),
        record=record_of(newest, with_model=with_models) if newest else None,
        stacks=found,
        stacks_from=how,
        is_moving=has_moved or (main is not None and any(s.frames != _plain(main.frames) for s in later)),
        runs_model=any(runs_model(s) for s in (main, *later) if s is not None),
        open_files=proc.files_for_writing(rank.pid)[:8] if letter == "D" else (),
        tracer=proc.tracer(rank.pid),
        host_load=round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        guard=next((g for f in frames[:4] if (g := guard_of(f)) is not None), None),
        loops=tuple(loop for f in frames if (loop := loop_of(f)) is not None),
    )


def _has_moved(newest: page.Record | None) -> bool:
    """Whether the rank has gone on since this record of it was read."""
    if newest is None:
        return False
    now = page_of(Path(newest.path).parent, newest.pid)
    return now is not None and now.marks != newest.marks


def _plain(frames: Sequence[Place]) -> tuple[Place, ...]:
    return tuple(replace(f, code="") for f in frames)


def _worker_pids(pid: int, found: page.Record | None) -> tuple[int, ...]:
    """The loader's workers, and other children of the rank."""
    known = found.loader_worker_pids if found else ()
    extra = [p for p in proc.children(pid) if p not in known]
    return (*known, *extra[:8])


def _worker(
    target: Target,
    stacks: dict[int, tuple[str, tuple[Stack, ...]]],
    span: tuple[proc.Times | None, proc.Times | None],
) -> Worker:
    found = target.page
    item, item_s = "", 0.0
    is_loader = found is not None and found.role == page.Role.LOADER_WORKER
    if is_loader and found is not None and found.sample_count > 0:
        at = found.sample_at
        known = 0 <= at < len(found.samples) and found.samples[at] >= 0
        item = str(found.samples[at]) if known else f"number {at + 1} of its batch" if at >= 0 else ""
        item_s = max(0.0, (time.monotonic_ns() - found.sample_ns) / 1e9) if found.sample_ns else 0.0
    share, main_share, _ = proc.shares(*span)
    return Worker(
        pid=target.pid,
        index=found.worker_id if is_loader and found is not None else None,
        state=proc.state(target.pid),
        wchan=proc.wchan(target.pid),
        is_loader=is_loader,
        command=proc.command(target.pid),
        stacks=tuple(stack_with_code(_own_part(s)) for s in stacks.get(target.pid, ("", ()))[1]),
        item=item,
        item_s=round(item_s, 2),
        cpu_share=round(max(share, main_share), 3),
    )


def _own_part(stack: Stack) -> Stack:
    """A forked worker's stack goes on into the parent's, as it was at the fork: only the inner part is its own."""
    for i, frame in enumerate(stack.frames):
        if frame.file.endswith("/_utils/worker.py") and frame.function == "_worker_loop":
            return replace(stack, frames=stack.frames[: i + 1])
    return stack


def last_evidence(rank: Rank, folder: Path | None, found: page.Record | None = None) -> Rank:
    """What a rank that has ended left behind: its record, and the stacks of a crash."""
    found = page_of(folder, rank.pid) or found
    if found is None:
        return rank
    stack_file = page.side_file(found, ".stack")
    try:
        text = stack_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    at = text.rfind("Fatal Python error")
    reason, crash = parse_faulthandler(text[at:]) if at >= 0 else ("", ())
    crash = tuple(stack_with_code(s) for s in _without_ours(crash))
    record = with_notes(record_of(found, with_model=True), found)
    broken = next((c for c in reversed(record.calls) if c.is_inside or c.has_failed), None)
    guard = guard_of(broken.where) if broken is not None and broken.where is not None else None
    return replace(rank, record=record, crash=crash, crash_reason=reason, guard=guard)


def node_of(node: Node, oom_before: int) -> Node:
    """The node's memory, shared memory, disk and cores, now."""
    limit, peak = proc.memory_limit_and_peak()
    size, free = proc.space("/dev/shm")
    return replace(
        node,
        oom_kills=max(0, proc.oom_kills() - oom_before),
        memory_limit_bytes=limit,
        memory_peak_bytes=peak,
        shm_size_bytes=size,
        shm_free_bytes=free,
        disk_free_bytes=proc.space(".")[1],
        num_cores=os.cpu_count(),
    )
