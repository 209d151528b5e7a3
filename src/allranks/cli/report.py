"""`allranks report RUN`: where the time went, who was slow, what went wrong, what to change."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from allranks.core.errors import UsageError
from allranks.record.rundir import DEFAULT_HOME

BESIDE_THE_RUN = ":"
"""What stands for the FILE of --html where none is given."""


class Command(TyperCommand):
    """--html may stand without its FILE, which typer cannot say."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a bare --html its default."""
        return super().parse_args(ctx, with_file(args))


def with_file(args: Sequence[str]) -> list[str]:
    """The arguments, with a value behind a bare --html: one at the end, before another option or before a directory."""
    out: list[str] = []
    for word, then in zip(args, [*args[1:], "--"], strict=False):
        is_bare = word == "--html" and (then.startswith("-") or Path(then).is_dir())
        out.append(f"--html={BESIDE_THE_RUN}" if is_bare else word)
    return out


def command(
    run: Annotated[
        str,
        typer.Argument(
            help="A run directory, or its name below ALLRANKS_HOME; the newest there if left out."
        ),
    ] = "",
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="[FILE]",
            help="Write one self-contained page with plots, RUN/report.html by default.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Chrome/Perfetto trace of all ranks together."),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option("--step", min=1, help="A step whose moments the page shows; may be repeated."),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(min=0, help="Times of this start of the ranks, 0 the first; the last if left out."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON (allranks-report/1).")
    ] = False,
) -> None:
    """Say what a run did, while it goes on or after its end.

    Example: allranks report runs/digits-20260101-120000 --html report.html
    """
    from allranks.report import as_data, as_text, finding, making, page, trace_events

    try:
        home = Path(os.environ.get("ALLRANKS_HOME", DEFAULT_HOME))
        found = finding.find(run, home)
        if not run:
            _say(f"no run was given; the newest below {home} is {found.path.name}")
        both = finding.join(found, home)
        report = making.make(
            both.launched, time.time(), trained=both.trained, attempt=attempt, pinned=tuple(step or ())
        )
    except UsageError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    try:
        if html is not None:
            file = found.path / "report.html" if html == BESIDE_THE_RUN else Path(html)
            file.write_text(page.as_page(report), encoding="utf-8")
            _say(f"page written to {file}")
        if trace is not None:
            trace.write_text(json.dumps(trace_events.as_trace(report)), encoding="utf-8")
            _say(f"trace written to {trace}; open it in ui.perfetto.dev or chrome://tracing")
    except OSError as error:
        _say(f"{error.filename} cannot be written: {error.strerror}")
        raise typer.Exit(3) from error
    if as_json:
        typer.echo(json.dumps(as_data.as_json(report), indent=2, allow_nan=False))
    elif html is None and trace is None:
        is_terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_terminal else None
        color = is_terminal and not os.environ.get("NO_COLOR")
        typer.echo(as_text.as_text(report, width=width, color=color), nl=False, color=color)


def _say(text: str) -> None:
    print(f"allranks: {text}", file=sys.stderr)
