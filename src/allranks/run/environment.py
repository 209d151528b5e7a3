"""Which environment does each rank get?

torchrun's variables, so that scripts need not know who started them, and ours (the table in docs/design/architecture.md).
Pure: the agent's own environment comes in as a mapping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import allranks
from allranks.core.cores import affinity
from allranks.core.overrides import VARIABLE
from allranks.run.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this node's ranks stand in the job; the hub decides it for each attempt."""

    job_id: str
    restart: int
    node_rank: int
    num_nodes: int
    first_rank: int
    local_world_size: int
    world_size: int
    master_addr: str
    master_port: int
    run_dir: Path
    node_dir: Path | None
    """This node's folder in shared memory: record/ and the stop file are in it."""
    interface: str = ""
    """The network interface that leads to the other nodes; "" with one node."""


def of_rank(
    place: Place, local_rank: int, options: Options, base: Mapping[str, str], num_cores: int
) -> dict[str, str]:
    """The complete environment of one rank."""
    env = dict(base)
    rank = place.first_rank + local_rank
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        GROUP_RANK=str(place.node_rank),
        ROLE_RANK=str(rank),
        ROLE_NAME=options.role,
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        WORLD_SIZE=str(place.world_size),
        GROUP_WORLD_SIZE=str(place.num_nodes),
        ROLE_WORLD_SIZE=str(place.world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
        TORCHELASTIC_RESTART_COUNT=str(place.restart),
        TORCHELASTIC_MAX_RESTARTS=str(options.max_restarts),
        TORCHELASTIC_RUN_ID=options.job,
        TORCHELASTIC_USE_AGENT_STORE="False",
        ALLRANKS_JOB=place.job_id,
        ALLRANKS_RUN_DIR=str(place.run_dir),
        ALLRANKS_AGENT_PID=str(os.getpid()),
    )
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    for name in ("ALLRANKS_RECORD_DIR", "ALLRANKS_STOP_FILE", "TORCHELASTIC_ERROR_FILE"):
        env.pop(name, None)  # another job's, if this launcher was started by a rank
    if place.node_dir is not None:
        env["ALLRANKS_STOP_FILE"] = str(place.node_dir / "stop")
        env["TORCHELASTIC_ERROR_FILE"] = str(place.node_dir / f"error-{place.restart}-{rank}.json")
    if options.watch and place.node_dir is not None:
        env["ALLRANKS_RECORD_DIR"] = str(place.node_dir / "record")
        boot = Path(allranks.__file__).parent / "record" / "boot"
        if boot.is_dir():
            env["PYTHONPATH"] = os.pathsep.join([str(boot), *filter(None, [env.get("PYTHONPATH", "")])])
    if options.overrides:
        env[VARIABLE] = json.dumps(options.overrides)
    if "threads" in options.overrides:
        env["OMP_NUM_THREADS"] = str(options.overrides["threads"])
        env.pop("ALLRANKS_OMP", None)
    else:
        _set_threads(env, num_cores // place.local_world_size)
    if options.overrides.get("bind_cores"):
        env["ALLRANKS_CORES"] = ",".join(map(str, cores_of(local_rank, place.local_world_size)))
    _set_interface(env, place)
    if options.virtual_local_rank:
        _show_one_device(env, local_rank)
    return env


def cores_of(local_rank: int, local_world_size: int, usable: Collection[int] | None = None) -> list[int]:
    """The cores that a rank is bound to: an equal part of the usable ones, neighbours together; one where there are too few."""
    cores = sorted(affinity() if usable is None else usable)
    if len(cores) < local_world_size:
        return [cores[local_rank % len(cores)]]
    first = local_rank * len(cores) // local_world_size
    return cores[first : (local_rank + 1) * len(cores) // local_world_size]


def _set_threads(env: dict[str, str], cores: int) -> None:
    # torchrun sets 1, which leaves cores idle on a CPU machine; unset, every rank would take all of them
    if "OMP_NUM_THREADS" not in env or env.get("ALLRANKS_OMP") == "agent":
        env["OMP_NUM_THREADS"] = str(max(1, cores))
        env["ALLRANKS_OMP"] = "agent"


def _set_interface(env: dict[str, str], place: Place) -> None:
    """gloo asks the host's name for its address (127.0.1.1 on Debian), which the other nodes cannot reach."""
    if place.num_nodes > 1 and place.interface:
        env.setdefault("GLOO_SOCKET_IFNAME", place.interface)
        if place.interface != "lo":
            env.setdefault("NCCL_SOCKET_IFNAME", "=" + place.interface)


def _show_one_device(env: dict[str, str], local_rank: int) -> None:
    visible = [v for v in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if v]
    env["CUDA_VISIBLE_DEVICES"] = visible[local_rank] if local_rank < len(visible) else str(local_rank)
    env["LOCAL_RANK"] = "0"


def command_of(options: Options, python: str) -> list[str]:
    """What a rank runs: the script by python -u, as torchrun does, or the user's own program."""
    if options.no_python:
        return [options.script, *options.args]
    if options.run_path:
        code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        return [python, "-u", "-c", code, options.script, *options.args]
    return [python, "-u", *(["-m"] if options.module else []), options.script, *options.args]
