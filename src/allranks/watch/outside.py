"""What does a job that already runs do, seen from outside, without its launcher?

Ranks are found by their records (`allranks run`, or `allranks.start()` under another launcher); a process without one is
looked at through /proc and py-spy.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path

from allranks.record import page
from allranks.watch import gather, proc
from allranks.watch.case import Case
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Node, Rank
from allranks.watch.verdict import Verdict, seconds

MIN_WAIT_S = 1.0


class NothingThere(ValueError):
    """There is no such job on this host."""


def look(*, pid: int | None = None, run: Path | None = None) -> tuple[Evidence, Verdict | None]:
    """The evidence of the job on this host, and the verdict if it stands still.

    Args:
        pid: Any process of the job.
        run: Its run directory.

    Raises:
        NothingThere: No live rank was found.
    """
    folder = _folder_of(pid, run)
    ranks = _ranks_of_records(folder) if folder is not None else ()
    if not ranks and pid is not None:
        ranks, folder = _ranks_of_processes(pid), None
    if not ranks:
        what = f"process {pid}" if pid is not None else str(run)
        raise NothingThere(f"no live rank of {what} was found on {socket.gethostname()}")
    taken = gather.take(ranks, folder, with_sockets=True, with_models=True, sample_s=0.3)
    world_size = max([len(taken), *(r.record.said_world_size for r in taken if r.record)])
    node = gather.node_of(Node(0, socket.gethostname(), ranks=tuple(r.rank for r in taken)), proc.oom_kills())
    evidence = Evidence(
        world_size=world_size, ranks=taken, nodes=(node,), cwd=_cwd(taken[0].pid), trigger="asked"
    )
    case = Case(evidence)
    if (case.waited_s() or 0.0) < MIN_WAIT_S and not any(r.state in ("T", "t") for r in taken):
        return evidence, None
    return evidence, decide(evidence)


def status(evidence: Evidence) -> list[str]:
    """One line per rank: what it does."""
    case, out = Case(evidence), []
    for rank in evidence.ranks:
        record = rank.record
        text = f"rank {rank.rank} (process {rank.pid}, state {rank.state or '?'})"
        if record is not None:
            text += f" step {record.step}, {record.phase} for {seconds(record.phase_s)}"
        lines = case.stands_at(rank)
        out.append(f"{text}: {lines[0]}" if lines else text)
    return out


def _folder_of(pid: int | None, run: Path | None) -> Path | None:
    """Where the job's records are."""
    if pid is not None:
        found = proc.environment(pid, "ALLRANKS_RECORD_DIR")
        if not found:
            kids = (proc.environment(p, "ALLRANKS_RECORD_DIR") for p in proc.children(pid))
            found = next((f for f in kids if f), "")
        return Path(found) if found else None
    folders = (
        proc.environment(p, "ALLRANKS_RECORD_DIR") for p in (proc.of_run(run) if run is not None else ())
    )
    return next((Path(found) for found in folders if found), None)


def _ranks_of_records(folder: Path) -> tuple[Rank, ...]:
    host = socket.gethostname()
    found = [
        r
        for r in page.read_pages(folder)
        if r.role == page.Role.RANK and proc.state(r.pid) not in ("", "Z", "X")
    ]
    return tuple(
        Rank(r.rank, host, local_rank=max(0, r.local_rank), pid=r.pid)
        for r in sorted(found, key=lambda r: r.rank)
    )


def _ranks_of_processes(pid: int) -> tuple[Rank, ...]:
    """The process and its siblings that have a rank by their environment; else only the process."""
    host = socket.gethostname()
    near = [pid, *proc.children(proc.parent(pid)), *proc.children(pid)]
    numbered = {int(n): p for p in near if (n := proc.environment(p, "RANK")).isdigit()}
    if not numbered:
        return (Rank(0, host, pid=pid),) if proc.state(pid) else ()
    return tuple(Rank(n, host, pid=p) for n, p in sorted(numbered.items()))


def _cwd(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def replay(file: Path) -> tuple[Evidence, Verdict | None]:
    """Decide again what diagnosis/NNN-ARnnn.json holds.

    Raises:
        NothingThere: The file holds no evidence.
    """
    from allranks.watch.evidence import from_json

    try:
        kept = json.loads(file.read_text(encoding="utf-8"))["evidence"]
    except (OSError, ValueError, KeyError) as error:
        raise NothingThere(f"{file} holds no evidence") from error
    if not kept:
        raise NothingThere(f"{file} holds no evidence")
    evidence = from_json(Evidence, kept)
    return evidence, decide(evidence)
