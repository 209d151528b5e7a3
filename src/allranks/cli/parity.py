"""`allranks parity`: does the script train on many ranks as on one? Names the first update, tensor and cause that differ."""

from __future__ import annotations

import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What stands behind the script is the script's."""


class BatchSize(str, Enum):
    """What the DataLoaders of a plain script get on one rank."""

    auto = "auto"
    keep = "keep"
    scale = "scale"


def command(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script; its own arguments follow.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks to compare with one.")] = 2,
    updates: Annotated[int, typer.Option(min=1, help="Updates after which both runs are left.")] = 20,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch dropout off in both runs.")
    ] = False,
    no_autocast: Annotated[
        bool, typer.Option("--no-autocast", help="Compute in float32 where the script asks for less.")
    ] = False,
    batch_size: Annotated[
        BatchSize,
        typer.Option(
            help="Plain DataLoaders on one rank: N times as large if they have a DistributedSampler, never, always."
        ),
    ] = BatchSize.auto,
    seed: Annotated[int, typer.Option(help="Of the generators before the script runs.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative difference of a gradient; by precision if not given."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write both loss curves to this SVG file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the recordings in this new folder.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Only record a run on --nproc ranks of this host into a folder all hosts see."),
    ] = None,
    launch: Annotated[str, typer.Option(help="More flags for allranks run, such as '--nnodes 2 ...'.")] = "",
    recorded: Annotated[
        Path | None, typer.Option("--with", help="Compare one rank with what --record wrote.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (allranks-parity/1).")] = False,
) -> None:
    """Run a script on 1 rank and on several with the same global batch, and compare every update.

    Example: allranks parity --nproc 2 train.py --lr 0.1
    """
    from allranks.core.errors import AllranksError
    from allranks.parity import report, runner

    _check(script, nproc, plot, keep, record, recorded)
    wish = runner.Wish(
        script=script,
        args=tuple(args or ()),
        num_ranks=nproc,
        launch=tuple(shlex.split(launch)),
        updates=updates,
        dropout=not no_dropout,
        autocast=not no_autocast,
        seed=seed,
        batch_size=batch_size.value,
        tolerance=tolerance,
        folder=keep,
        recorded=recorded,
    )
    try:
        if record is not None:
            runner.record(wish, record.absolute())
            return
        answer = runner.run(wish, lambda text: print(f"[allranks] {text}", file=sys.stderr))
    except AllranksError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(3) from error
    told = (answer.one, answer.many, answer.result, answer.finding, answer.notes)
    if plot is not None:
        plot.write_text(report.as_svg(answer.result, answer.many.world_size, answer.finding))
    print(json.dumps(report.as_json(*told), indent=2) if as_json else report.as_text(*told))
    raise typer.Exit(0 if answer.finding is None else 1)


def _check(
    script: str, nproc: int, plot: Path | None, keep: Path | None, record: Path | None, recorded: Path | None
) -> None:
    """Refuse what cannot be meant."""
    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} is not an .svg file", param_hint="--plot")
    if keep is not None and keep.exists():
        raise typer.BadParameter(f"{keep} exists", param_hint="--keep")
    if not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    if record is not None and recorded is not None:
        raise typer.BadParameter("first --record, then --with", param_hint="--with")
    if recorded is not None and not (recorded / "options.json").exists():
        raise typer.BadParameter(f"{recorded} is not a folder that --record wrote", param_hint="--with")
    if nproc == 1 and record is None and recorded is None:
        raise typer.BadParameter("one rank is always compared: 2 or more", param_hint="--nproc")
