"""What does a job that already runs do, seen from outside, without its launcher?

Ranks are found by their records (`allranks run`, or `allranks.start()` under another launcher); a process without one is
looked at through /proc and py-spy (from_stacks.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from allranks.record import page
from allranks.record.inprocess import all_records, folder_of
from allranks.record.notes import read_notes
from allranks.watch import gather, peeking, proc
from allranks.watch.case import Case
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Node, Rank
from allranks.watch.from_stacks import with_record
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
    with tempfile.TemporaryDirectory(prefix="allranks-watch-") as own:
        folder = _folder_of(pid, run)
        ranks = _ranks_of_records(folder) if folder is not None else ()
        if folder is None or not ranks:
            ranks = _ranks_of_processes(pid) if pid is not None else _ranks_of_starts(run)
            folder = _link_records(ranks, Path(own))
        if not ranks:
            what = f"process {pid}" if pid is not None else str(run)
            raise NothingThere(f"no live rank of {what} was found on {socket.gethostname()}")
        taken = _take(ranks, folder)
    said = [proc.environment(r.pid, "WORLD_SIZE") for r in ranks]
    said_size = [int(n) for n in said if n.isdigit()]
    world_size = max([len(taken), *said_size, *(r.record.said_world_size for r in taken if r.record)])
    node = gather.node_of(Node(0, socket.gethostname(), ranks=tuple(r.rank for r in taken)), proc.oom_kills())
    evidence = Evidence(
        world_size=world_size, ranks=taken, nodes=(node,), cwd=_cwd(taken[0].pid), trigger="asked"
    )
    case = Case(evidence)
    if (case.waited_s() or 0.0) < MIN_WAIT_S and not any(r.state in ("T", "t") for r in taken):
        return evidence, None
    verdict = decide(evidence)
    return (evidence, None) if verdict is None else peeking.with_values(evidence, verdict, node_rank=0)


def _take(ranks: tuple[Rank, ...], folder: Path) -> tuple[Rank, ...]:
    """The ranks' evidence; where some have no record, after a while in which it is seen whether they run."""
    before = {r.pid: _ran(r.pid) for r in ranks}
    began = time.monotonic()
    if any(gather.page_of(folder, r.pid) is None for r in ranks):
        time.sleep(MIN_WAIT_S + 0.2)
    taken = gather.take(
        ranks, folder, with_sockets=True, with_models=True, sample_s=0.3, within_s=gather.TAKE_S + 2.0
    )
    stood = {r.pid: before[r.pid] is not None and _ran(r.pid) == before[r.pid] for r in ranks}
    return tuple(with_record(r, time.monotonic() - began if stood[r.pid] else 0.0) for r in taken)


def _ran(pid: int) -> tuple[int, float] | None:
    """What grows while its main thread runs: how often it left a core, which may be never where it has its own, and its time on one."""
    switches, times = proc.switches(pid), proc.times(pid)
    return (switches, times.main_s) if switches and times is not None else None


def status(evidence: Evidence) -> list[str]:
    """One line per rank: what it does."""
    case, out = Case(evidence), []
    for rank in evidence.ranks:
        record = rank.record
        text = f"rank {rank.rank} (process {rank.pid}, state {rank.state or '?'})"
        if record is not None:
            text += f" step {record.step}," if record.is_probed else ""
            text += f" {record.phase}" + (f" for {seconds(record.phase_s)}" if record.phase_s else "")
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


def _link_records(ranks: Iterable[Rank], folder: Path) -> Path:
    """One folder of the records that allranks.start() made under another launcher, each process in a folder of its own."""
    for rank in ranks:
        own = folder_of(rank.pid)
        for file in own.iterdir() if own is not None else ():
            with contextlib.suppress(OSError):
                (folder / file.name).symlink_to(file)
    return folder


def _ranks_of_starts(run: Path | None) -> tuple[Rank, ...]:
    """The live ranks whose allranks.start() named this run directory, under another launcher."""
    if run is None:
        return ()
    wanted, host = str(run.resolve()), socket.gethostname()
    found = []
    for record in all_records():
        said = [n.get("path") for n in read_notes(record.path) if n.get("kind") == "run"]
        if (
            said
            and str(Path(str(said[-1])).resolve()) == wanted
            and proc.state(record.pid) not in ("", "Z", "X")
        ):
            found.append(Rank(record.rank, host, local_rank=max(0, record.local_rank), pid=record.pid))
    return tuple(sorted(found, key=lambda r: r.rank))


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
