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
            Slurm's, AR004 ranks spread unevenly or without --ntasks-per-node over several nodes, AR006 several hosts under MPI
            without MASTER_ADDR.
    """
    host = host or socket.gethostname()
    for find in (_from_torch, _from_slurm, _from_mpi):
        place = find(env, host)
        if place is not None:
            return place
    reason = "no launcher's variables are set"
    if "SLURM_JOB_ID" in env:
        reason = "inside a Slurm allocation, but not in a step started by srun"
    if "WORLD_SIZE" in env and _number(env, "WORLD_SIZE", low=1) > 1:
        raise StartError(
            "AR001",
            f"WORLD_SIZE={env['WORLD_SIZE']} set, but not RANK",
            why="this process cannot tell which of the ranks it is, and must not train as if it were alone",
            fix="set RANK, too; or start with allranks run, torchrun or srun; or unset WORLD_SIZE to train alone",
        )
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


def _port(env: Mapping[str, str], default: int) -> int:
    if "MASTER_PORT" not in env:
        return default
    port = _number(env, "MASTER_PORT", low=1)  # 0 would be another port on every rank
    if port > 65535:
        raise StartError(
            "AR002",
            f"MASTER_PORT={port} is above 65535, the largest port there is",
            fix="MASTER_PORT between 1024 and 65535, the same on all ranks",
        )
    return port


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
    if local_world_size is None:  # set by hand: all on this node, unless a node number says otherwise
        local_world_size = 1 if "GROUP_RANK" in env and local_rank == 0 else world_size
        _check_range(local_rank or 0, local_world_size, "LOCAL_RANK", "WORLD_SIZE")
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
        master_port=_port(env, 29500),
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0,
    )


def _check_against_slurm(env: Mapping[str, str], rank: int, world_size: int) -> None:
    # Only for variables set by hand: under torchrun inside srun, one Slurm task is a node and its number is not a rank.
    if not _is_in_step(env):
        return
    name = _ntasks_name(env)
    procid, ntasks = _number(env, "SLURM_PROCID"), _number(env, name, low=1)
    if ntasks > 1 and (procid, ntasks) != (rank, world_size):
        raise StartError(
            "AR003",
            f"RANK={rank} WORLD_SIZE={world_size}, but Slurm says SLURM_PROCID={procid} {name}={ntasks}",
            why="likely RANK and WORLD_SIZE were exported in the batch script, so every task got the same",
            fix="unset RANK WORLD_SIZE LOCAL_RANK before srun",
        )


# Slurm numbers the steps that are no srun's of the user from here: batch script, interactive shell, external processes.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def _is_in_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process: SLURM_PROCID is also set in the batch script, where no other task runs."""
    if "SLURM_PROCID" not in env or "SLURM_NTASKS" not in env or "SLURM_STEP_ID" not in env:
        return False
    step = env["SLURM_STEP_ID"]
    return not (step.isdigit() and int(step) >= _FIRST_SPECIAL_STEP)


def _ntasks_name(env: Mapping[str, str]) -> str:
    # srun --preserve-env (salloc's interactive shell) leaves the job's number in SLURM_NTASKS.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"


def _from_slurm(env: Mapping[str, str], host: str) -> Place | None:
    if not _is_in_step(env) or _mpi_differs(env):
        return None
    ntasks_name = _ntasks_name(env)
    rank, world_size = _number(env, "SLURM_PROCID"), _number(env, ntasks_name, low=1)
    _check_range(rank, world_size, "SLURM_PROCID", ntasks_name)
    if "WORLD_SIZE" in env and _number(env, "WORLD_SIZE", low=1) not in (1, world_size):
        raise StartError(
            "AR003",
            f"WORLD_SIZE={env['WORLD_SIZE']}, but Slurm says {ntasks_name}={world_size}",
            why="likely exported in the batch script for a different number of tasks per node",
            fix="unset WORLD_SIZE before srun, and ask for the ranks with --nodes and --ntasks-per-node",
        )
    nodes_name = next((n for n in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if n in env), None)
    num_nodes = _number(env, nodes_name, low=1) if nodes_name else 1
    per_node = _tasks_per_node(env, world_size, num_nodes)
    nodes = (
        env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or host
    )
    job = f"{env.get('SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}"
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, "SLURM_LOCALID") if "SLURM_LOCALID" in env else rank % per_node,
        local_world_size=per_node,
        node_rank=_number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else rank // per_node,
        num_nodes=num_nodes,
        host=host,
        launcher="Slurm",
        reason=f"SLURM_PROCID and {ntasks_name} are set in step {job}",
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        master_port=_port(env, port_of(job)),
        attempt=_number(env, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in env else 0,
    )


def _tasks_per_node(env: Mapping[str, str], world_size: int, num_nodes: int) -> int:
    """Ranks on this node; an error where Slurm was left to spread them as it liked over several nodes."""
    gpus, devices = _gpus_of_slurm(env)
    share = gpus or max(1, world_size // num_nodes)
    fix = f"#SBATCH --nodes={num_nodes} --ntasks-per-node={share}, and no --ntasks"
    spread = env.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = expand_counts(spread)
    if len(set(counts)) > 1:
        raise StartError(
            "AR004",
            f"SLURM_NTASKS={world_size} ranks lie unevenly on the nodes: SLURM_STEP_TASKS_PER_NODE={spread}",
            why=devices,
            fix=fix,
        )
    if num_nodes > 1 and "SLURM_NTASKS_PER_NODE" not in env:
        raise StartError(
            "AR004",
            f"SLURM_NTASKS={world_size} over SLURM_NNODES={num_nodes} nodes, and SLURM_NTASKS_PER_NODE is not set",
            why="with --ntasks alone Slurm may put a different number of ranks on each node"
            + (f": here {spread}" if spread else "")
            + (f"; {devices}" if devices else ""),
            fix=fix,
        )
    if counts:
        return counts[0]  # what srun did, also where it was told other numbers than the batch script
    if "SLURM_NTASKS_PER_NODE" not in env:
        return world_size
    per_node = _number(env, "SLURM_NTASKS_PER_NODE", low=1)
    if per_node * num_nodes != world_size:
        raise StartError(
            "AR004",
            f"SLURM_NTASKS={world_size} is not SLURM_NTASKS_PER_NODE={per_node} x SLURM_NNODES={num_nodes}",
            why=devices,
            fix=fix,
        )
    return per_node


def _gpus_of_slurm(env: Mapping[str, str]) -> tuple[int, str]:
    """(GPUs of this node as Slurm counts them, which variable says so); (0, '') where none does."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        found = re.fullmatch(r"(?:[\w.-]+:)*(\d+)", env.get(name, ""))  # 4, or a100:4
        if found and int(found[1]) > 0:
            return int(found[1]), f"{name}={env[name]}: one rank for each GPU of a node is {found[1]}"
    return 0, ""


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of one number per node: '2(x3),1' gives [2, 2, 2, 1]; [] for what is no such form."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _mpi_differs(env: Mapping[str, str]) -> bool:
    """Whether mpirun started this process inside a Slurm step: then the step's tasks are mpirun's own daemons."""
    names = _mpi_names(env)
    if names is None:
        return False
    numbers = (env[names[0]], env[names[1]])
    return numbers != (env["SLURM_PROCID"], env[_ntasks_name(env)])


def _from_mpi(env: Mapping[str, str], host: str) -> Place | None:
    names = _mpi_names(env)
    if names is None:
        return None
    rank, world_size = _number(env, names[0]), _number(env, names[1], low=1)
    _check_range(rank, world_size, names[0], names[1])
    local_rank = _number(env, names[2]) if names[2] in env else rank
    local_size = _number(env, names[3], low=1) if names[3] in env else world_size
    _check_range(local_rank, local_size, names[2], names[3])
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
        master_port=_port(env, port_of(job)),
    )


def _mpi_names(env: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    return next((n for n in _MPI_NAMES if n[0] in env and n[1] in env), None)


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
    """The first host of a Slurm node list: 'gpu[03-05,9],login' gives 'gpu03', 'r[1-2]n[3-4]' gives 'r1n3'."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group() if first else nodelist)
