"""Who is in the job? Which nodes may join, in which order they stand, and who is missing.

Pure: hellos in; refusals, places and sentences out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from allranks.core.errors import StartError
from allranks.run.options import Options
from allranks.run.wire import VERSION


@dataclass(frozen=True, slots=True)
class Hello:
    """What a node says of itself when it joins."""

    host: str
    nproc: int
    nproc_asked: str = "1"
    node_rank: int | None = None
    job: str = "none"
    min_nodes: int = 1
    max_nodes: int = 1
    free_port: int = 0
    local_addr: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    wire: int = VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Hello | None:
        """None if it is not a hello of ours."""
        names = {f.name for f in fields(cls)}
        try:
            hello = cls(**{k: v for k, v in values.items() if k in names})
            return hello if isinstance(hello.host, str) and int(hello.nproc) > 0 else None
        except (TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one node in an attempt."""

    node_rank: int
    first_rank: int
    hello: Hello

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.first_rank, self.first_rank + self.hello.nproc))


def refusal(new: Hello, hub: Hello, present: Sequence[Hello], where: str) -> StartError | None:
    """Why a node may not join; None if it may.

    Args:
        new: The node.
        hub: The node that owns the meeting point.
        present: The nodes that are in, the hub's too.
        where: host:port of the meeting point.
    """
    if new.wire != hub.wire:
        return StartError(
            "AR318",
            f"host {new.host} and host {hub.host} run different versions of allranks",
            why=f"{new.versions.get('allranks')} and {hub.versions.get('allranks')} do not understand each other",
            fix="install the same version on all nodes",
        )
    if new.job != hub.job:
        return StartError(
            "AR312",
            f"host {new.host} belongs to job {new.job!r}, but job {hub.job!r} meets at {where}",
            why="--rdzv-id differs between the nodes, or another job's hub has this port",
            fix=f"--rdzv-id {hub.job}, or another port for one of the jobs",
        )
    if (new.min_nodes, new.max_nodes) != (hub.min_nodes, hub.max_nodes):
        return StartError(
            "AR313",
            f"--nnodes is {_nnodes(new)} on host {new.host} and {_nnodes(hub)} on host {hub.host}",
            why="all nodes must be started with the same --nnodes",
            fix=f"--nnodes {_nnodes(hub)}",
        )
    if new.nproc != hub.nproc and new.nproc_asked.isdigit() and hub.nproc_asked.isdigit():
        return StartError(
            "AR313",
            f"--nproc is {new.nproc} on host {new.host} and {hub.nproc} on host {hub.host}",
            why="each node was told another number of ranks; with --nproc auto they may differ",
            fix=f"--nproc {hub.nproc}",
        )
    twins = [h for h in present if h.node_rank is not None and h.node_rank == new.node_rank]
    if twins:
        free = sorted(set(range(hub.max_nodes)) - {h.node_rank for h in present})
        return StartError(
            "AR311",
            f"host {new.host} and host {twins[0].host} both say --node-rank {new.node_rank}",
            why="each node has a number of its own",
            fix=f"--node-rank {free[0]} on one of them" if free else "check the number of nodes",
        )
    return None


def seats(hellos: Sequence[Hello], previous: Sequence[str] = ()) -> list[Seat]:
    """Places for an attempt: by --node-rank where it was given, else the hub first and then by host name.

    Args:
        hellos: The nodes in the order they joined, the hub's first.
        previous: Hosts in the order of the attempt before; who was there keeps the order.
    """
    rank_of = {host: i for i, host in enumerate(previous)}

    def order(item: tuple[int, Hello]) -> tuple[int, int, str, int]:
        index, hello = item
        wanted = hello.node_rank if hello.node_rank is not None else 1 << 20
        before = rank_of.get(hello.host, 0 if index == 0 else 1 << 20)
        return wanted, before, "" if index == 0 else hello.host, index

    found: list[Seat] = []
    first = 0
    for node_rank, (_, hello) in enumerate(sorted(enumerate(hellos), key=order)):
        found.append(Seat(node_rank, first, hello))
        first += hello.nproc
    return found


def attendance(hellos: Sequence[Hello], options: Options, waited_s: float, where: str) -> str:
    """Who is here and who is not, in one line."""
    hub = hellos[0]
    here = ", ".join(_here(h, i) for i, h in enumerate(hellos))
    missing = absent(hellos, options.max_nodes)
    named = [_absent(n, hub.nproc) for n in missing]
    num_missing = options.max_nodes - len(hellos)
    who = " and ".join(named) if named else f"{num_missing} more node{'s' * (num_missing > 1)}"
    enough = f" (enough to start: {options.min_nodes})" if len(hellos) >= options.min_nodes else ""
    return (
        f"waiting for {who} at {where}: {len(hellos)} of {options.max_nodes} nodes are here{enough}, {here}; "
        f"{waited_s:.0f} s so far"
    )


def absent(hellos: Sequence[Hello], num_nodes: int) -> list[int]:
    """Node ranks nobody has claimed; [] where the nodes are not numbered by hand."""
    if any(h.node_rank is None for h in hellos):
        return []
    return sorted(set(range(num_nodes)) - {h.node_rank for h in hellos if h.node_rank is not None})


def version_differences(hellos: Sequence[Hello]) -> list[str]:
    """One sentence for each package whose version is not the same everywhere."""
    said: list[str] = []
    for name in hellos[0].versions:
        by_version: dict[str, list[str]] = {}
        for hello in hellos:
            by_version.setdefault(hello.versions.get(name, "?"), []).append(hello.host)
        if len(by_version) > 1:
            parts = [f"{version} on {', '.join(hosts)}" for version, hosts in sorted(by_version.items())]
            said.append(f"AR318 {name} differs between the nodes: {'; '.join(parts)}")
    return said


def _nnodes(hello: Hello) -> str:
    low, high = hello.min_nodes, hello.max_nodes
    return str(low) if low == high else f"{low}:{high}"


def _here(hello: Hello, index: int) -> str:
    name = f"node {hello.node_rank} = " if hello.node_rank is not None else ""
    return f"{name}{hello.host}{' (this is where they meet)' if index == 0 else ''}"


def _absent(node_rank: int, nproc: int) -> str:
    first, last = node_rank * nproc, node_rank * nproc + nproc - 1
    ranks = (
        f"rank {first}"
        if first == last
        else f"ranks {first}-{last}"
        if last > first + 1
        else f"rank {first} and rank {last}"
    )
    return f"node {node_rank} ({ranks})"
