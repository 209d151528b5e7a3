"""Which options does `allranks run` take, and what did this command line ask for?

torchrun's own flags with torchrun's meanings (hyphens or underscores, PET_* variables as defaults), and ours. What torchrun takes
but has no effect here is taken too, and said once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from allranks.core.errors import StartError
from allranks.core.job import OnHang
from allranks.run.endpoint import check_port, split_endpoint

Show = Literal["0", "all"] | tuple[int, ...]

EXAMPLE = """examples:
  allranks run --nproc 4 train.py --lr 0.1
  allranks run --nnodes 2 --node-rank 0 --master-addr gpu-a --master-port 29500 --nproc 4 train.py
  srun allranks run --nnodes $SLURM_NNODES --nproc auto --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py
"""

WITHOUT_EFFECT = {
    "event_log_handler": "events are in RUN/events.jsonl",
    "logs_specs": "every rank's output is in RUN/ranks",
    "duplicate_stdout_filters": "every rank's output is in RUN/ranks",
    "duplicate_stderr_filters": "every rank's output is in RUN/ranks",
    "numa_binding": "ranks are not bound to cores",
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
    notes: tuple[str, ...] = ()
    """What was given and has no effect, to be said once."""

    @property
    def is_elastic(self) -> bool:
        """Whether the job may run on fewer nodes than it may have."""
        return self.min_nodes < self.max_nodes


def duration_s(text: str) -> float:
    """Seconds in '90', '90s', '10m', '1.5h'."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        value = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90, 30s, 10m or 2h") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return value


def rank_list(text: str) -> tuple[int, ...]:
    """(0, 2, 3) from '0,2-3'."""
    ranks: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            ranks += range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,2-3") from None
    return tuple(ranks)


def _show(text: str) -> Show:
    return text if text in ("0", "all") else rank_list(text)  # type: ignore[return-value]  # narrowed by the test


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise StartError(
            "AR030",
            f"allranks run: {message}",
            why="the command line cannot be read",
            fix="allranks run --help",
        )


class _Add:
    """Adds options in both spellings, with PET_<NAME> as the default where it is set, as torchrun does."""

    def __init__(self, parser: argparse.ArgumentParser, env: Mapping[str, str]) -> None:
        self.group, self.parser, self.env = parser.add_argument_group("torchrun's options"), parser, env

    def section(self, title: str) -> None:
        self.group = self.parser.add_argument_group(title)

    def __call__(self, *names: str, **how: Any) -> None:
        long = next(n for n in names if n.startswith("--"))
        name = how.get("dest") or long[2:].replace("-", "_")
        spellings = [n for n in names if n not in how.get("hidden", ())]
        under = [
            n.replace("-", "_").replace("__", "--", 1) for n in names if n.startswith("--") and "-" in n[2:]
        ]
        preset = self.env.get(f"PET_{name.upper()}")
        if preset is not None:
            is_flag = how.get("action") == "store_true"
            how["default"] = preset not in ("0", "") if is_flag else how.get("type", str)(preset)
        self.group.add_argument(*spellings, dest=name, **how)
        if under:
            action = self.parser._option_string_actions[spellings[0]]
            for other in under:  # the second spelling works, the help shows the first
                self.parser._option_string_actions[other] = action


def build_parser(env: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of `allranks run`; `env` gives the PET_* defaults."""
    parser = _Parser(
        prog="allranks run",
        description="Start a script on every rank of this node, watch it, and tell one story when it ends.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="allranks run [options] script.py [script's arguments]",
    )
    add = _Add(parser, env)
    _add_torchrun(add)
    add.section("allranks' own")
    _add_ours(add)
    parser.add_argument("script", help="the script (or module with -m, program with --no-python)")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add_torchrun(add: _Add) -> None:
    add(
        "--nproc-per-node",
        "--nproc",
        default="1",
        metavar="N",
        help="ranks on this node: a number, auto (GPUs, or 2), gpu, cpu",
    )
    add("--nnodes", default="1:1", metavar="N|MIN:MAX", help="nodes of the job")
    add("--node-rank", type=int, default=None, metavar="N", help="index of this node")
    add("--rdzv-backend", default=None, metavar="NAME", help="static or c10d")
    add("--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="where the nodes meet")
    add("--rdzv-id", default="none", metavar="ID", help="name of the job; the same on all nodes")
    add("--rdzv-conf", default="", metavar="K=V,...", help="join_timeout, last_call_timeout in seconds")
    add("--standalone", action="store_true", help="one node, a free port (the default for one node)")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again after a failure, at most N times",
    )
    add("--monitor-interval", type=float, default=None, help=argparse.SUPPRESS)
    add("--start-method", default=None, help=argparse.SUPPRESS)
    add("--event-log-handler", default=None, help=argparse.SUPPRESS)
    add("--role", default="default", help="ROLE_NAME of the ranks")
    add("--module", "-m", action="store_true", help="the script is a module, as in python -m")
    add("--no-python", action="store_true", help="the script is a program of its own")
    add("--run-path", action="store_true", help="run the script by runpy.run_path")
    add("--log-dir", default="", metavar="DIR", help="keep the ranks' output below DIR instead of RUN/ranks")
    add("--redirects", "-r", default="0", help="do not show these streams: 3, or LOCAL_RANK:STREAM,...")
    add("--tee", "-t", default="0", help="show these streams: 3, or LOCAL_RANK:STREAM,...")
    add(
        "--local-ranks-filter", type=rank_list, default=(), metavar="LIST", help="show only these local ranks"
    )
    add("--duplicate-stdout-filters", default=None, help=argparse.SUPPRESS)
    add("--duplicate-stderr-filters", default=None, help=argparse.SUPPRESS)
    add("--master-addr", default="", metavar="HOST", help="where node 0 listens")
    add("--master-port", type=int, default=None, metavar="PORT", help="its port (29500)")
    add("--local-addr", default="", metavar="ADDR", help="address of this node that the others can reach")
    add("--logs-specs", default=None, help=argparse.SUPPRESS)
    add("--numa-binding", default=None, help=argparse.SUPPRESS)
    add("--signals-to-handle", default=None, help=argparse.SUPPRESS)
    add(
        "--shutdown-timeout", type=float, default=2.0, metavar="S", help="seconds from SIGTERM to SIGKILL (2)"
    )
    add("--virtual-local-rank", action="store_true", help="LOCAL_RANK=0 and one visible GPU for each rank")


def _add_ours(add: _Add) -> None:
    add("--run-dir", default="", metavar="DIR", help="the run directory (runs/<script>-<date>-<time>)")
    add(
        "--show-ranks",
        type=_show,
        default="0",
        metavar="0|all|LIST",
        help="whose output is shown, line by line",
    )
    add("--no-watch", action="store_true", help="no record, no watcher")
    add("--on-hang", choices=get_args(OnHang), default="report", help="what to do about a hang after --after")
    add(
        "--after", type=duration_s, default=None, metavar="TIME", help="how long a hang may last, such as 10m"
    )
    add(
        "--stop-before",
        type=duration_s,
        default=None,
        metavar="TIME",
        help="stop this long before Slurm's end of the job",
    )
    add(
        "--requeue-exit-code",
        type=int,
        default=None,
        metavar="N",
        help="exit code after a preemption that ended well",
    )
    add("--requeue", action="store_true", help="after a preemption, ask Slurm to queue the job again")
    add(
        "--node-silence", type=float, default=1.5, metavar="S", help="seconds of silence until a node is lost"
    )
    add("--json", action="store_true", help="the story of a failure as one JSON object on stdout")


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """The options in `argv` (without the program's name), all checked against each other.

    Raises:
        StartError: AR030 unreadable, AR031 nnodes, AR032 port, AR033 backend, AR039 options that exclude each other.
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
