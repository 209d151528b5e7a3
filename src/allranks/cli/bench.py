"""`allranks bench`: how quick is the script on 1, 2, 4 ... ranks, and with each way of exchanging gradients?"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What stands behind the script is the script's."""


def command(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script; its own arguments follow.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
    ranks: Annotated[
        str,
        typer.Option(
            help="Numbers of ranks, such as 1,2,4; by default doubled up to all GPUs, or all cores."
        ),
    ] = "",
    strategies: Annotated[
        str,
        typer.Option(
            help="Of script, ddp, memory, fp16, bf16, powersgd, dataparallel; several with commas, or all."
        ),
    ] = "script",
    seconds: Annotated[float, typer.Option(min=0.2, help="Of steps in a trial, at least.")] = 3.0,
    most: Annotated[
        float, typer.Option(min=0.2, help="And at most, where the figure does not become stable.")
    ] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Each setting once a round, in another order.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Write the curve to this SVG file.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (allranks-bench/1).")] = False,
) -> None:
    """Measure a script on several numbers of ranks, each for a few seconds in a launch of its own.

    Example: allranks bench --ranks 1,2 --strategies script,ddp,bf16 train.py --lr 0.1
    """
    from allranks.bench import rounds as several
    from allranks.bench import telling, trial
    from allranks.run.trial import other_work

    if not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} is not an .svg file", param_hint="--plot")
    settings = several.settings_of(_ranks(ranks), _strategies(strategies))
    if busy := other_work():
        print(f"[allranks] {busy}", file=sys.stderr)
    wish = trial.Wish(script, tuple(args or ()), least_s=seconds, most_s=max(seconds, most))
    answer = several.measure(
        settings,
        rounds,
        lambda setting: trial.try_once(setting, wish),
        lambda text: print(f"[allranks] {text}", file=sys.stderr),
    )
    told = telling.as_json(answer, script, wish.args)
    if plot is not None:
        plot.write_text(telling.as_svg(answer, script))
    if save is not None:
        save.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=2) if as_json else telling.as_text(answer, " ".join([script, *wish.args])))
    raise typer.Exit(1 if all(row.failure for row in answer.rows) else 0)


def _ranks(text: str) -> list[int]:
    from allranks.bench.rounds import doublings

    if not text:
        return doublings(_num_gpus() or len(os.sched_getaffinity(0)))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list such as 1,2,4", param_hint="--ranks")
    return sorted({int(part) for part in parts})


def _strategies(text: str) -> list[str]:
    from allranks.bench.strategies import NAMES

    names = [part.strip() for part in text.split(",") if part.strip()]
    if names == ["all"]:
        names = [name for name in NAMES if name != "dataparallel" or _num_gpus() > 1]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise typer.BadParameter(f"{text!r}: known are {', '.join(NAMES)}, all", param_hint="--strategies")
    if "dataparallel" in names and _num_gpus() < 2:
        raise typer.BadParameter(
            f"dataparallel needs 2 GPUs or more, here are {_num_gpus()}", param_hint="--strategies"
        )
    return list(dict.fromkeys(names))


def _num_gpus() -> int:
    """GPUs of this machine, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() and part.strip() != "-1"])
    devices = [p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()]
    return len(devices)
