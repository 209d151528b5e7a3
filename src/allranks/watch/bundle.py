"""How do exits, rows and what was gathered become one Evidence?"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from allranks.core.job import Job, NodeInfo, RankExit
from allranks.watch import gather, kernel_log, proc
from allranks.watch.evidence import Call, Evidence, Exit, Loader, Node, Rank, Record
from allranks.watch.reading import place_of, with_code
from allranks.watch.related import related_lines
from allranks.watch.rows import Row
from allranks.watch.stacks import parse_traceback
from allranks.watch.store import with_store
from allranks.watch.verdict import seconds

_MISSING = re.compile(
    r"No such file or directory: '([^']+)'|Parent directory (\S+) does not exist"
    r"|(?:file|File) (/\S+) (?:not found|cannot be opened|does not exist)"
)
_DEAD_WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? ?(\d+)")
TAIL_BYTES = 64 << 10
_PORT = re.compile(r"port: (\d+)|:(\d{2,5})\b")


def rank_of_exit(ended: RankExit, folder: Path | None, *, is_local: bool) -> Rank:
    """A rank that has ended, with what it left behind."""
    how = Exit(ended.code, ended.signal, ended.when, by_us=ended.by_us)
    failure = parse_traceback(ended.last_lines) if ended.failed else None
    if failure is not None:
        failure = replace(failure, frames=tuple(with_code(f) if not f.code else f for f in failure.frames))
    rank = Rank(
        ended.rank,
        host=ended.host,
        node_rank=ended.node_rank,
        pid=ended.pid,
        exit=how,
        failure=failure,
        output=tuple(ended.last_lines[-30:]),
    )
    if is_local and ended.pid:
        rank = gather.last_evidence(rank, folder)
    rank = replace(rank, notes=_notes(rank), related=related_lines(rank))
    return with_store(rank) if is_local else rank


def with_failure(rank: Rank, log: Path) -> Rank:
    """A rank whose exception is on its way out, with the traceback that its log holds by now."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return rank
    failure = parse_traceback(lines)
    if failure is None:
        rank = replace(rank, output=tuple(lines[-30:]))
        return replace(rank, related=related_lines(rank))
    frames = tuple(f if f.code else with_code(f) for f in failure.frames)
    rank = replace(rank, failure=replace(failure, frames=frames), output=tuple(lines[-30:]))
    return replace(rank, notes=_notes(rank), related=related_lines(rank))


def _notes(rank: Rank) -> dict[str, str]:
    """What can be found out about the error now, on this host."""
    notes: dict[str, str] = {}
    message = rank.failure.message if rank.failure else ""
    if found := _MISSING.search(message):
        path = next(g for g in found.groups() if g)
        notes["missing"] = path
        if path.startswith("/") and Path(path).exists():
            notes["exists"] = "moments"
    notes |= _of_memory(rank)
    if re.search(r"EADDRINUSE|address already in use", message, re.I) and (port := _PORT.search(message)):
        owner = proc.listener(int(port[1] or port[2]))
        if owner is not None:
            notes["port_owner"] = f"process {owner} ({proc.command(owner)[:60]})"
    return notes


def _of_memory(rank: Rank) -> dict[str, str]:
    """Whether the kernel's log says that it, or a worker of its loader, was killed for memory: 'oom' and 'oom_worker'."""
    dead = _DEAD_WORKER.search(rank.failure.message) if rank.failure else None
    if not dead and (rank.exit is None or rank.exit.signal != signal.SIGKILL):
        return {}
    killed = kernel_log.oom_kills()
    found = {"oom": killed[rank.pid]} if rank.pid in killed else {}
    if dead and int(dead[1]) in killed:
        found["oom_worker"] = killed[int(dead[1])]
    return found


def rank_of_row(row: Row, host: str, node_rank: int) -> Rank:
    """A rank of a node that was not asked, or does not answer: what its newest row said."""
    where = place_of(f"{row.where} ?") if row.where else None
    if where is not None:
        where = replace(where, function="", code=where.code or row.code)
    calls: tuple[Call, ...] = ()
    if row.op:
        calls = (
            Call(
                row.op,
                group=row.group,
                members=row.members,
                seq=row.call_seq,
                where=where,
                age_s=row.call_s,
                is_inside=True,
            ),
        )
    record = Record(
        step=row.step,
        phase=row.phase or "start",
        phase_s=row.phase_s,
        tick_s=row.tick_s,
        median_step_s=row.median_step_s,
        where=where,
        calls=calls,
        group_seq=row.seq,
        exit_kind="ended" if row.has_ended_well else "",
        loader=Loader(row.loader[0], row.loader[1], row.loader[2], is_exhausted=row.loader[3])
        if row.loader
        else None,
    )
    return Rank(row.rank, host=host, node_rank=node_rank, state=row.state, record=record, is_by_row=True)


def nodes_of(
    job: Job, infos: Mapping[int, NodeInfo], own: Node | None, others: Mapping[int, Node]
) -> tuple[Node, ...]:
    """All nodes, with what was gathered on them."""
    out = []
    for number, info in sorted(infos.items()):
        base = own if own is not None and number == job.node_rank else others.get(number)
        node = base or Node(number, info.host)
        out.append(
            replace(
                node,
                host=info.host,
                ranks=tuple(info.ranks),
                is_lost=info.is_lost,
                lost_why=info.lost_why,
                lost_s=round(info.age_s, 2),
                address=info.address,
            )
        )
    return tuple(out)


def evidence_of(
    job: Job,
    ranks: Sequence[Rank],
    nodes: tuple[Node, ...],
    trigger: str,
    *,
    age_s: float = 0.0,
    here: int | None = None,
) -> Evidence:
    """All of it, ranks in order."""
    limits = [
        n["timeout_s"]
        for r in ranks
        if r.record
        for n in r.record.noted
        if n.get("kind") == "meets" and isinstance(n.get("timeout_s"), int | float)
    ]
    return Evidence(
        limit_s=min(limits, default=None),
        world_size=job.world_size,
        ranks=tuple(sorted(ranks, key=lambda r: r.rank)),
        nodes=nodes,
        cwd=str(Path.cwd()),
        age_s=round(age_s, 2),
        trigger=trigger,
        here=here,
    )


def lost_words(info: NodeInfo) -> str:
    """'silent for 1.2 s'."""
    return info.lost_why or f"silent for {seconds(info.age_s)}"
