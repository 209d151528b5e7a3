"""`allranks parity`: does the script train on many ranks as on one? Names the first update, tensor and cause that differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What stands behind the script is the script's."""

EXAMPLE = "allranks parity --nproc 2 train.py --lr 0.1"


def command(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script; its own arguments follow.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=2, help="Ranks to compare with one.")] = 2,
    updates: Annotated[int, typer.Option(min=1, help="Updates after which both runs are left.")] = 20,
    no_dropout: Annotated[
        bool, typer.Option("--no-dropout", help="Switch dropout off in both runs.")
    ] = False,
    keep_batch_size: Annotated[
        bool,
        typer.Option("--keep-batch-size", help="Plain DDP: one rank takes the batch size as it is written."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the generators before the script runs.")] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(help="Largest relative difference of a gradient; by precision if not given."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write both loss curves to this SVG file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the recordings in this new folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (allranks-parity/1).")] = False,
) -> None:
    """Run a script on 1 rank and on several with the same global batch, and compare every update.

    Example: allranks parity --nproc 2 train.py --lr 0.1
    """
    from allranks.core.errors import AllranksError
    from allranks.parity import report, runner

    if plot is not None and plot.suffix != ".svg":
        raise typer.BadParameter(f"{plot} is not an .svg file", param_hint="--plot")
    if keep is not None and keep.exists():
        raise typer.BadParameter(f"{keep} exists", param_hint="--keep")
    if not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    wish = runner.Wish(
        script=script,
        args=tuple(args or ()),
        num_ranks=nproc,
        updates=updates,
        dropout=not no_dropout,
        seed=seed,
        keeps_batch_size=keep_batch_size,
        tolerance=tolerance,
        folder=keep,
    )
    try:
        answer = runner.run(wish, lambda text: print(f"[allranks] {text}", file=sys.stderr))
    except AllranksError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(3) from error
    told = (answer.one, answer.many, answer.result, answer.finding, answer.notes)
    if plot is not None:
        plot.write_text(report.as_svg(answer.result, nproc, answer.finding))
    print(json.dumps(report.as_json(*told), indent=2) if as_json else report.as_text(*told))
    raise typer.Exit(0 if answer.finding is None else 1)
