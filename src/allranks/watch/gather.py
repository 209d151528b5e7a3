"""How is evidence taken from the ranks of this node?

All ranks are asked together (asking.py: themselves where all threads sleep, else by py-spy), and the asking has one deadline, after which
nobody is asked any more; what is read from files and sockets afterwards takes milliseconds. About 0.2 s for ranks that sleep, 0.3-0.6 s
with ranks that run on a machine with cores to spare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allranks.record import page
from allranks.record.notes import read_notes
from allranks.watch import proc, source, store
from allranks.watch.asking import NO_STACKS, Asker, Stacks, Target, without_ours
from allranks.watch.caught import handlers_of, with_errors
from allranks.watch.evidence import Node, Rank, Stack, Worker
from allranks.watch.file_locks import file_lock_of
from allranks.watch.reading import (
    condition_of,
    guard_of,
    loop_of,
    record_of,
    seen_on,
    source_of,
    stack_with_code,
)
from allranks.watch.stacks import main_stack, parse_faulthandler, runs_model, user_frames
from allranks.watch.tracing import with_notes, with_numbers
from allranks.watch.verdict import Place

TAKE_S = 0.7
"""For all of a node's evidence, so that an answer is there before the hub decides without it; later steps are left out."""
SAMPLE_S = 0.12
"""Between two looks at processor time and stacks."""
LOOKS, LOOKS_APART_S = 4, 0.013
"""More stacks of a rank that uses the processor."""
BUSY = 0.3
"""So much of a core."""
SNAPSHOT_TRIES = 5  # readings of all pages, until two agree


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
    within_s: float = TAKE_S,
    is_over: bool = False,
) -> tuple[Rank, ...]:
    """The evidence of these live ranks (of which rank, pid, host and node are filled in), all at once.

    Args:
        ranks: What to look at.
        folder: Where the record pages are.
        with_sockets: Look at connections to other hosts, too (5 ms for each rank).
        with_models: Read what each parameter of the model is.
        sample_s: How long processor time is measured.
        within_s: After so long no process is asked any more.
        is_over: See Asker.
    """
    asker = Asker(within_s, is_over=is_over)
    pages = {r.pid: page_of(folder, r.pid) for r in ranks}
    workers = {r.pid: _worker_pids(r.pid, pages[r.pid]) for r in ranks}
    everybody = [
        Target(p, pages.get(p) or page_of(folder, p)) for r in ranks for p in (r.pid, *workers[r.pid])
    ]
    store.begin(read_notes(p.path) for p in pages.values() if p is not None and p.phase == page.Phase.INIT)
    before = {t.pid: proc.times(t.pid) for t in everybody}
    stacks = asker.stacks(everybody)
    time.sleep(max(0.0, min(sample_s, asker.left_s)))
    after = {t.pid: proc.times(t.pid) for t in everybody}
    busy = [t for t in everybody if t.pid in pages and proc.shares(before[t.pid], after[t.pid])[0] > BUSY]
    again = _stacks_later(asker, busy)
    newest = pages_at_one_moment(folder, list(pages))
    stacks |= _stacks_again(asker, everybody, newest)
    by_pid = {t.pid: t for t in everybody}
    out = []
    for rank in ranks:
        span = before[rank.pid], after[rank.pid]
        taken = _rank(rank, newest.get(rank.pid), stacks, again, span, with_models)
        kids = tuple(_worker(by_pid[p], stacks, (before[p], after[p])) for p in workers[rank.pid])
        if taken.record is not None and (own := newest.get(rank.pid)):
            taken = with_errors(replace(taken, record=with_notes(taken.record, own)))
        taken = replace(taken, workers=kids, sockets=proc.sockets(rank.pid) if with_sockets else ())
        out.append(store.with_store(replace(taken, file_lock=file_lock_of(taken))))
    return tuple(out)


def take_quietly(ranks: Sequence[Rank], folder: Path | None) -> tuple[Rank, ...]:
    """What the records and notes of these ranks say, also of ended ones; no rank is signalled, and it takes a few ms."""
    out = []
    for rank in ranks:
        found = page_of(folder, rank.pid)
        if found is not None:
            record = with_numbers(record_of(found, with_model=True), found)
            out.append(with_errors(replace(rank, state=proc.state(rank.pid), record=record)))
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


def _stacks_later(asker: Asker, busy: Sequence[Target]) -> list[Stacks]:
    """More stacks of ranks that use the processor, a moment apart: does the work change?"""
    found: list[Stacks] = []
    for _ in range(LOOKS if busy else 0):
        time.sleep(min(LOOKS_APART_S, asker.left_s))
        found.append(asker.stacks(busy, is_extra=True))
        if not found[-1]:
            break  # the time is up, or all were asked often enough
    return found


def _stacks_again(asker: Asker, targets: Sequence[Target], newest: dict[int, page.Record]) -> Stacks:
    """New stacks of the ranks that have gone on since theirs was taken; none where they do not stand still for one."""
    moved = [
        Target(t.pid, newest[t.pid])
        for t in targets
        if t.pid in newest and t.page is not None and t.page.marks != newest[t.pid].marks
    ]
    taken = asker.stacks(moved) if moved else {}
    stood: Stacks = {}
    for target in moved:
        assert target.page is not None
        now = page_of(Path(target.page.path).parent, target.pid)
        has_stood = now is not None and now.marks == target.page.marks
        stood[target.pid] = taken.get(target.pid, NO_STACKS) if has_stood else NO_STACKS
    return stood


def _rank(
    rank: Rank,
    newest: page.Record | None,
    stacks: Stacks,
    again: list[Stacks],
    span: tuple[proc.Times | None, proc.Times | None],
    with_models: bool,
) -> Rank:
    letter, waits_in = proc.state(rank.pid), proc.wchan(rank.pid)
    how, found = stacks.get(rank.pid, NO_STACKS)
    has_moved = _has_moved(newest) or stacks.get(rank.pid) == NO_STACKS
    if has_moved:  # what was seen is of several moments: nothing of it tells what the rank does now
        found, waits_in = (), ""
        letter = (
            "R" if letter in ("T", "t") else letter
        )  # if it was stopped just now, the next look says where
    found = tuple(stack_with_code(s) for s in found)
    share, main_share, waited = proc.shares(*span)
    main = main_stack(found)
    frames = user_frames(main.frames) if main else ()
    later = [s for one in again if rank.pid in one and (s := main_stack(one[rank.pid][1])) is not None]
    record = record_of(newest, with_model=with_models) if newest else None
    if record is not None and main is not None and newest is not None and newest.is_light:
        record = seen_on(main, record)
    is_unknown = (
        not later and share > BUSY
    )  # no time was left for a second look: it may be at work that changes
    return replace(
        rank,
        state=letter,
        wchan=waits_in,
        cpu_share=round(share, 3),
        main_cpu_share=round(main_share, 3),
        run_queue_share=round(waited, 3),
        record=record,
        stacks=found,
        stacks_from=how,
        is_moving=has_moved
        or is_unknown
        or (main is not None and any(s.frames != _plain(main.frames) for s in later)),
        runs_model=any(runs_model(s) for s in (main, *later) if s is not None),
        open_files=proc.files_for_writing(rank.pid)[:8] if letter == "D" else (),
        tracer=proc.tracer(rank.pid),
        host_load=round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),
        guard=next((g for f in frames[:4] if (g := guard_of(f)) is not None), None),
        is_cleaning_up=any(source.is_cleanup(source_of(f.file), f.line) for f in frames[:6]),
        condition=next((c for f in frames[:4] if (c := condition_of(f)) is not None), None),
        handlers=handlers_of(frames),
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
    stacks: Stacks,
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
        stacks=tuple(stack_with_code(_own_part(s)) for s in stacks.get(target.pid, NO_STACKS)[1]),
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
    reason, crash = parse_faulthandler(text[at:]) if at >= 0 else NO_STACKS
    crash = tuple(stack_with_code(s) for s in without_ours(crash))
    record = with_notes(record_of(found, with_model=True), found)
    broken = next((c for c in reversed(record.calls) if c.is_inside or c.has_failed), None)
    guard = guard_of(broken.where) if broken is not None and broken.where is not None else None
    return with_errors(replace(rank, record=record, crash=crash, crash_reason=reason, guard=guard))


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
