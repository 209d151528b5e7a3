"""`allranks watch RUN` or `--pid PID`: what a running job does, and why it stands still if it does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from allranks.watch import outside


def command(
    run: str = typer.Argument(
        "", help="The run directory of a job on this host, or a diagnosis/NNN-ARnnn.json to decide again."
    ),
    named: str = typer.Option("", "--run", help="The same as the run directory given alone."),
    pid: int = typer.Option(0, "--pid", help="Any process of the job, also one started by torchrun."),
    as_json: bool = typer.Option(False, "--json", help="The verdict and its evidence as JSON."),
) -> None:
    """Say what each rank does; exit code 1 if the job stands still, with the verdict.

    allranks watch runs/digits-20260101-120000
    """
    run = run or named
    if bool(run) == bool(pid) or named not in ("", run):
        print("allranks: give a run directory, or --pid", file=sys.stderr)
        raise typer.Exit(2)
    try:
        if run.endswith(".json"):
            evidence, verdict = outside.replay(Path(run))
        else:
            evidence, verdict = outside.look(pid=pid or None, run=Path(run) if run else None)
    except outside.NothingThere as error:
        print(f"allranks: {error}", file=sys.stderr)
        raise typer.Exit(3) from error
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "version": 1,
                    "verdict": verdict.to_json() if verdict else None,
                    "evidence": evidence.to_json(),
                }
            )
        )
    elif verdict is not None:
        typer.echo(verdict.text(color=sys.stdout.isatty()))
    else:
        typer.echo("\n".join(outside.status(evidence)))
    raise typer.Exit(1 if verdict is not None else 0)
