"""Where am I, and with whom? Which launcher started this process, and which rank of how many it is.

First match wins: torch elastic's variables (torchrun, allranks run), then Slurm's (inside a step started by srun), then Open MPI's or
PMI's, then alone. What contradicts itself is an error that names both values, before anything waits.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from allranks.core.errors import StartError


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks of its job; ranks and sizes as torchrun counts them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    host: str
    launcher: str  # "allranks run", "torchrun", "environment", "Slurm", "MPI" or "alone"
    reason: str  # why this launcher was taken, for the log
    master_addr: str
    master_port: int
    attempt: int = 0  # restarts of the job so far

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that writes."""
        return self.rank == 0

    def __str__(self) -> str:
        started = "alone" if self.launcher == "alone" else f"started by {self.launcher}"
        return (
            f"rank {self.rank} of {self.world_size} (local rank {self.local_rank} of {self.local_world_size}, "
            f"node {self.node_rank} of {self.num_nodes}) on host {self.host}, {started}: {self.reason}"
        )


def find_place(env: Mapping[str, str], host: str | None = None) -> Place:
    """Read this process' place from the variables its launcher set.

    Args:
        env: The environment, usually os.environ.
        host: This host's name; asked of the system if not given.

    Raises:
        StartError: AR001 a variable is missing, AR002 a value is no number or out of range, AR003 torch's variables contradict
            Slurm's, AR004 --ntasks without --ntasks-per-node on several nodes, AR006 several hosts under MPI without MASTER_ADDR.
    """
    host = host or socket.gethostname()
    for find in (_from_torch, _from_slurm, _from_mpi):
        place = find(env, host)
        if place is not None:
            return place
    reason = "no launcher's variables are set"
    if "SLURM_JOB_ID" in env:
        reason = "inside a Slurm allocation, but not in a step started by srun"
    return Place(0, 1, 0, 1, 0, 1, host, "alone", reason, "127.0.0.1", 0)


def _number(env: Mapping[str, str], name: str, low: int = 0) -> int:
    text = env[name]
    try:
        value = int(text)
    except ValueError:
        raise StartError(
            "AR002", f"{name}={text!r} is not a whole number", fix=f"unset {name}, or start with allranks run"
        ) from None
    if value < low:
        raise StartError(
            "AR002", f"{name}={value} is below {low}", fix=f"unset {name}, or start with allranks run"
        )
    return value


def _check_range(rank: int, world_size: int, rank_name: str, size_name: str) -> None:
    if rank >= world_size:
        raise StartError(
            "AR002",
            f"{rank_name}={rank} does not fit {size_name}={world_size}: ranks go from 0 to {world_size - 1}",
            why="likely set by hand, or by a launcher that counts from 1",
            fix=f"{rank_name} between 0 and {world_size - 1}, or start with allranks run",
        )


def _from_torch(env: Mapping[str, str], host: str) -> Place | None:
    if "RANK" not in env and not ("WORLD_SIZE" in env and "LOCAL_RANK" in env):
        return None
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    if missing:
        have = ", ".join(f"{n}={env[n]}" for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if n in env)
        raise StartError(
            "AR001",
            f"{have} set, but not {' and '.join(missing)}",
            fix="set both, or start with allranks run",
        )
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE", low=1)
    _check_range(rank, world_size, "RANK", "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", low=1) if "LOCAL_WORLD_SIZE" in env else None
    if local_rank is not None and local_world_size is not None:
        _check_range(local_rank, local_world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if local_world_size is not None and local_world_size > world_size:
        raise StartError(
            "AR002",
            f"LOCAL_WORLD_SIZE={local_world_size} is more than WORLD_SIZE={world_size}",
            fix="unset both, or start with allranks run",
        )
    launcher = (
        "allranks run"
        if "ALLRANKS_JOB" in env
        else "torchrun"
        if "TORCHELASTIC_RUN_ID" in env
        else "environment"
    )
    if launcher == "environment":
        _check_against_slurm(env, rank, world_size)
    if world_size > 1 and "MASTER_ADDR" not in env:
        raise StartError(
            "AR001",
            f"WORLD_SIZE={world_size}, but not MASTER_ADDR and MASTER_PORT",
            fix="export MASTER_ADDR=<host of rank 0> MASTER_PORT=29500, or start with allranks run",
        )
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else 29500
    if port > 65535:
        raise StartError(
            "AR002", f"MASTER_PORT={port} is above 65535", fix="MASTER_PORT between 1024 and 65535"
        )
    local_world_size = local_world_size or (
        world_size if local_rank is None or "GROUP_RANK" not in env else 1
    )
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=rank if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=_number(env, "GROUP_RANK") if "GROUP_RANK" in env else rank // local_world_size,
        num_nodes=_number(env, "GROUP_WORLD_SIZE", low=1)
        if "GROUP_WORLD_SIZE" in env
        else -(-world_size // local_world_size),
        host=host,
        launcher=launcher,
        reason="RANK and WORLD_SIZE are set",
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=port,
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0,
    )


def _check_against_slurm(env: Mapping[str, str], rank: int, world_size: int) -> None:
    # Only for variables set by hand: under torchrun inside srun, one Slurm task is a node and its number is not a rank.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env:
        return
    procid, ntasks = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS", low=1)
    if ntasks > 1 and (procid, ntasks) != (rank, world_size):
        raise StartError(
            "AR003",
            f"RANK={rank} WORLD_SIZE={world_size}, but Slurm says SLURM_PROCID={procid} SLURM_NTASKS={ntasks}",
            why="likely RANK and WORLD_SIZE were exported in the batch script, so every task got the same",
            fix="unset RANK WORLD_SIZE LOCAL_RANK before srun",
        )


def _from_slurm(env: Mapping[str, str], host: str) -> Place | None:
    # SLURM_PROCID is also set in the batch script itself, where no other task runs: only a step has tasks.
    if "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env or "SLURM_STEP_ID" not in env:
        return None
    rank, world_size = _number(env, "SLURM_PROCID"), _number(env, "SLURM_NTASKS", low=1)
    _check_range(rank, world_size, "SLURM_PROCID", "SLURM_NTASKS")
    num_nodes = (
        _number(env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES", low=1)
        if "SLURM_NNODES" in env
        else 1
    )
    per_node = _tasks_per_node(env, world_size, num_nodes)
    local_rank = _number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else rank % per_node
    nodes = (
        env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or host
    )
    job = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}"
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=per_node,
        node_rank=_number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else rank // per_node,
        num_nodes=num_nodes,
        host=host,
        launcher="Slurm",
        reason=f"SLURM_PROCID and SLURM_NTASKS are set in step {job}",
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        master_port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else port_of(job),
        attempt=_number(env, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in env else 0,
    )


def _tasks_per_node(env: Mapping[str, str], world_size: int, num_nodes: int) -> int:
    """Ranks on this node; an error where Slurm was left to spread them as it liked over several nodes."""
    if "SLURM_NTASKS_PER_NODE" in env:
        per_node = _number(env, "SLURM_NTASKS_PER_NODE", low=1)
        if per_node * num_nodes != world_size:
            raise StartError(
                "AR004",
                f"SLURM_NTASKS={world_size} is not SLURM_NTASKS_PER_NODE={per_node} x SLURM_NNODES={num_nodes}",
                fix=f"#SBATCH --nodes={num_nodes} --ntasks-per-node={max(1, world_size // num_nodes)}, and no --ntasks",
            )
        return per_node
    if num_nodes > 1:
        share = max(1, world_size // num_nodes)
        raise StartError(
            "AR004",
            f"SLURM_NTASKS={world_size} over SLURM_NNODES={num_nodes} nodes, and SLURM_NTASKS_PER_NODE is not set",
            why="with --ntasks alone Slurm may put a different number of ranks on each node"
            + (f": here {env['SLURM_STEP_TASKS_PER_NODE']}" if "SLURM_STEP_TASKS_PER_NODE" in env else ""),
            fix=f"#SBATCH --nodes={num_nodes} --ntasks-per-node={share} --gpus-per-node={share}",
        )
    return world_size


def _from_mpi(env: Mapping[str, str], host: str) -> Place | None:
    names = next((n for n in _MPI_NAMES if n[0] in env and n[1] in env), None)
    if names is None:
        return None
    rank, world_size = _number(env, names[0]), _number(env, names[1], low=1)
    _check_range(rank, world_size, names[0], names[1])
    local_rank = _number(env, names[2]) if names[2] in env else rank
    local_size = _number(env, names[3], low=1) if names[3] in env else world_size
    addr = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == world_size else "")
    if not addr:
        raise StartError(
            "AR006",
            f"{names[1]}={world_size}, {names[3]}={local_size}: several hosts, and MPI does not say which one rank 0 is on",
            fix="mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ...",
        )
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("PMI_JOBID") or "mpi"
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // local_size,
        num_nodes=-(-world_size // local_size),
        host=host,
        launcher="MPI",
        reason=f"{names[0]} and {names[1]} are set",
        master_addr=addr,
        master_port=_number(env, "MASTER_PORT") if "MASTER_PORT" in env else port_of(job),
    )


# rank, world size, local rank, local world size: Open MPI, then MPICH and Intel MPI (hydra)
_MPI_NAMES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def port_of(job: str) -> int:
    """A port that all ranks of a job derive alike, below Linux's ephemeral range (32768), so that no client socket sits on it."""
    return 20000 + int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "big") % 12000


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: 'gpu[03-05,9],login' gives 'gpu03'."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodelist.strip())
    return "".join(part or "" for part in match.groups()) if match else nodelist
