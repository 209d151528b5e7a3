"""Which options does `allranks run` take, and what did this command line ask for?

Its options are checked against each other here (command_line.py reads them). What torchrun takes but has no effect here is taken too, and
said once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from allranks.core.errors import StartError
from allranks.core.job import OnHang
from allranks.core.overrides import read_settings, words_of
from allranks.run.command_line import Show, build_parser
from allranks.run.endpoint import check_port, split_endpoint

WITHOUT_EFFECT = {
    "event_log_handler": "events are in RUN/events.jsonl",
    "logs_specs": "every rank's output is in RUN/ranks",
    "duplicate_stdout_filters": "every rank's output is in RUN/ranks",
    "duplicate_stderr_filters": "every rank's output is in RUN/ranks",
    "numa_binding": "--set bind_cores=true gives each rank cores of its own",
    "signals_to_handle": "SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are always forwarded",
    "start_method": "each rank is a fresh interpreter",
    "monitor_interval": "an exit is seen at once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One `allranks run` command line, checked; no part of it depends on this machine yet."""

    script: str
    args: tuple[str, ...] = ()
    nproc: str = "1"
    """An integer, or auto, gpu, cpu."""
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    backend: Literal["static", "c10d"] = "static"
    host: str = ""
    """Where the hub listens; "" with one node that did not say."""
    port: int | None = None
    job: str = "none"
    """--rdzv-id."""
    conf: Mapping[str, str] = field(default_factory=dict)
    local_addr: str = ""
    max_restarts: int = 0
    role: str = "default"
    module: bool = False
    no_python: bool = False
    run_path: bool = False
    log_dir: str = ""
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: tuple[int, ...] = ()
    virtual_local_rank: bool = False
    grace_s: float = 2.0
    """Seconds between SIGTERM and SIGKILL when ranks are stopped (--shutdown-timeout)."""
    run_dir: str = ""
    show: Show = "0"
    watch: bool = True
    on_hang: OnHang = "report"
    after_s: float | None = None
    stop_before_s: float | None = None
    requeue_exit_code: int | None = None
    requeue: bool = False
    json: bool = False
    silence_s: float = 1.5
    """A node that is silent for longer is lost."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """--set: settings in place of the script's own."""
    notes: tuple[str, ...] = ()
    """What was given and has no effect, to be said once."""

    @property
    def is_elastic(self) -> bool:
        """Whether the job may run on fewer nodes than it may have."""
        return self.min_nodes < self.max_nodes


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """The options in `argv` (without the program's name), all checked against each other.

    Raises:
        StartError: AR030 unreadable, AR031 nnodes, AR032 port, AR033 backend, AR039 options that exclude each other,
            AR040 a setting that is none.
    """
    given = build_parser(env).parse_args(list(argv))
    min_nodes, max_nodes = _nodes(given.nnodes)
    notes = [
        f"--{k.replace('_', '-')} has no effect here: {why}"
        for k, why in WITHOUT_EFFECT.items()
        if getattr(given, k) is not None
    ]
    if given.module and given.no_python:
        raise StartError(
            "AR039", "-m/--module and --no-python exclude each other", fix="leave one of them out"
        )
    if given.max_restarts < 0:
        raise StartError(
            "AR039", f"--max-restarts {given.max_restarts} is negative", fix="--max-restarts 0 for none"
        )
    backend, host, port = _endpoint(given, max_nodes, notes)
    if given.node_rank is not None and not 0 <= given.node_rank < max_nodes:
        raise StartError(
            "AR031",
            f"--node-rank {given.node_rank} with --nnodes {given.nnodes}",
            why=f"the nodes are numbered 0 to {max_nodes - 1}",
            fix=f"--node-rank {max_nodes - 1}",
        )
    if given.on_hang == "report" and given.after is not None:
        notes.append("--after has no effect without --on-hang stop or restart")
    overrides = read_settings(given.set, env)
    if overrides:
        notes.append(words_of(overrides))
    return Options(
        script=given.script,
        args=tuple(given.args),
        nproc=given.nproc_per_node,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=given.node_rank,
        backend=backend,
        host=host,
        port=port,
        job=given.rdzv_id,
        conf=_conf(given.rdzv_conf),
        local_addr=given.local_addr,
        max_restarts=given.max_restarts,
        role=given.role,
        module=given.module,
        no_python=given.no_python,
        run_path=given.run_path,
        log_dir=given.log_dir,
        redirects=given.redirects,
        tee=given.tee,
        local_ranks_filter=given.local_ranks_filter,
        virtual_local_rank=given.virtual_local_rank,
        grace_s=given.shutdown_timeout,
        run_dir=given.run_dir,
        show=given.show_ranks,
        watch=not given.no_watch,
        on_hang=given.on_hang,
        after_s=given.after,
        stop_before_s=given.stop_before,
        requeue_exit_code=given.requeue_exit_code,
        requeue=given.requeue,
        json=given.json,
        silence_s=given.node_silence,
        overrides=overrides,
        notes=tuple(notes),
    )


def _nodes(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low = high = 0
    if not 0 < low <= high:
        raise StartError(
            "AR031",
            f"--nnodes {text} is not N or MIN:MAX with 1 <= MIN <= MAX",
            fix="--nnodes 2 or --nnodes 1:4",
        )
    return low, high


def _endpoint(
    given: argparse.Namespace, max_nodes: int, notes: list[str]
) -> tuple[Literal["static", "c10d"], str, int | None]:
    """Backend, host and port where the nodes meet."""
    backend = given.rdzv_backend or "static"
    if backend.startswith("etcd"):
        raise StartError(
            "AR033",
            f"--rdzv-backend {backend} is not supported",
            why="the nodes meet at the agent of one of them; no etcd server is asked, which would be one more thing to fail",
            fix="--rdzv-backend c10d --rdzv-endpoint HOST:29500 with the host of any one node",
        )
    if backend not in ("static", "c10d"):
        raise StartError(
            "AR033", f"--rdzv-backend {backend} is not known", fix="--rdzv-backend c10d (or static)"
        )
    if given.standalone:
        if max_nodes > 1:
            raise StartError(
                "AR039",
                f"--standalone is for one node, but --nnodes is {given.nnodes}",
                fix="leave --standalone out",
            )
        if given.rdzv_endpoint or given.master_addr or given.master_port is not None:
            notes.append("--standalone: --rdzv-endpoint, --master-addr and --master-port have no effect")
        return backend, "", None
    if given.rdzv_endpoint:
        host, port = split_endpoint(given.rdzv_endpoint, given.master_port)
        if given.master_addr and given.master_addr != host:
            notes.append(
                f"--master-addr {given.master_addr} has no effect beside --rdzv-endpoint {given.rdzv_endpoint}"
            )
    else:
        host, port = given.master_addr, given.master_port
        if max_nodes > 1:
            host = host or "127.0.0.1"
    if port is not None:
        check_port(port)
    elif max_nodes > 1:
        port = 29500 if backend == "static" else 29400  # torchrun's defaults
    return backend, host, port


def _conf(text: str) -> dict[str, str]:
    pairs = [p.partition("=") for p in filter(None, text.split(","))]
    wrong = [k for k, eq, _ in pairs if not eq]
    if wrong:
        raise StartError(
            "AR030", f"--rdzv-conf {text}: {wrong[0]!r} is not KEY=VALUE", fix="--rdzv-conf join_timeout=600"
        )
    conf = {k.strip(): v.strip() for k, _, v in pairs}
    for key in ("timeout", "join_timeout", "last_call_timeout"):
        try:
            float(conf.get(key, "0"))
        except ValueError:
            raise StartError(
                "AR030", f"--rdzv-conf {key}={conf[key]} is not a number of seconds", fix=f"{key}=600"
            ) from None
    return conf
