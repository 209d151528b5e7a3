"""How is the command line of `allranks run` read?

torchrun's own flags with torchrun's meanings (hyphens or underscores, PET_* variables as defaults), and ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Literal, get_args

from allranks.core.errors import StartError
from allranks.core.job import OnHang

Show = Literal["0", "all"] | tuple[int, ...]

EXAMPLE = """examples:
  allranks run --nproc 4 train.py --lr 0.1
  allranks run --nnodes 2 --node-rank 0 --master-addr gpu-a --master-port 29500 --nproc 4 train.py
  srun allranks run --nnodes $SLURM_NNODES --nproc auto --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py
"""


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
            action = how.get("action")
            typed = how.get("type", str)
            how["default"] = preset not in ("0", "") if action == "store_true" else typed(preset)
            if action == "append":
                how["default"] = [preset]
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
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting in place of the script's own (allranks tune finds them), such as num_workers=4",
    )
