"""Which ranks did a script start itself (mp.spawn), and how did they end? The launcher knows only the process that started them."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from allranks.core.job import Job, RankExit
from allranks.record import page
from allranks.watch import bundle, gather, proc
from allranks.watch.evidence import Exit, Rank
from allranks.watch.stacks import parse_traceback

_ENDED = re.compile(r"process (\d+) terminated with (?:signal (\w+)|exit code (\d+))")
_RAISED = re.compile(r"-- Process (\d+) terminated with the following error")


def find(job: Job) -> tuple[int, dict[int, Rank]]:
    """(world size, the ranks) that the only process of this job has started, by their pages; nothing if there are none."""
    if job.record_dir is None or len(job.ranks) != 1 or job.world_size != 1:
        return 0, {}
    parent = job.ranks[0].pid
    found = [
        r
        for r in page.read_pages(job.record_dir)
        if r.role == page.Role.RANK and r.pid != parent and r.world_size > 1
    ]
    if len(found) < 2:
        return 0, {}
    newest = {r.rank: r for r in sorted(found, key=lambda r: r.start_ns)}
    ranks = {n: Rank(n, job.host, job.node_rank, n, r.pid) for n, r in newest.items()}
    return max(r.world_size for r in newest.values()), ranks


def at_exit(ended: RankExit, ranks: Sequence[Rank], folder: Path | None) -> dict[int, Rank]:
    """What became of them when the process that started them ended; that process alone if it says nothing of them."""
    text = "\n".join(ended.last_lines)
    gone, raised = _ENDED.search(text), _RAISED.search(text)
    if not gone and not raised:
        return {ended.rank: bundle.rank_of_exit(ended, folder, is_local=True)}
    told = int((gone or raised)[1])  # type: ignore[index]  # one of them was found
    out = {}
    for rank in ranks:
        last = replace(gather.last_evidence(rank, folder), output=tuple(ended.last_lines[-30:]))
        if rank.rank == told:
            out[rank.rank] = _told(last, ended, gone)
        elif proc.state(rank.pid) in ("", "Z", "X"):  # by the process that started it
            out[rank.rank] = replace(last, exit=Exit(-1, signal.SIGTERM, ended.when, by_us=True), output=())
    return out


def _told(rank: Rank, ended: RankExit, gone: re.Match[str] | None) -> Rank:
    if gone is not None:
        number = getattr(signal, gone[2] or "", None)
        return replace(rank, exit=Exit(-1 if number else int(gone[3] or 1), number, ended.when))
    lines = list(ended.last_lines)
    start = next(n for n, line in enumerate(lines) if _RAISED.search(line))
    return replace(rank, exit=Exit(1, None, ended.when), failure=parse_traceback(lines[start + 1 :]))
