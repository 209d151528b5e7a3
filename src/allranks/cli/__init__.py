"""The command line: `allranks VERB ...`, one file a verb, imported when it is asked for.

`main` is the entry point. No torch is imported here. `allranks run` takes torchrun's command lines with a parser of its own, and
starts 0.1 s sooner without typer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

COMMANDS = (
    ("run", "allranks.cli.run", "Start a script on every rank, watch it, tell one story when it ends."),
    ("parity", "allranks.cli.parity", "Compare a script on 1 rank and on several, update by update."),
    ("watch", "allranks.cli.watch", "Say what a running job does, and why it stands still if it does."),
    (
        "report",
        "allranks.cli.report",
        "Say after a run where its time went, what went wrong, what to change.",
    ),
    (
        "bench",
        "allranks.cli.bench",
        "Measure a script on 1, 2, 4 ... ranks and with each way to exchange gradients.",
    ),
    ("tune", "allranks.cli.tune", "Find the settings that make a script quickest on this machine."),
    ("explain", "allranks.cli.explain", "Show the page of one cause, such as AR204."),
    ("version", "allranks.cli.version", "Show the versions that belong in a report."),
)
"""Name, module with a typer function `command`, and one line of help."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["run"]:
        from allranks.cli.run import run

        sys.exit(run(arguments[1:]))
    if arguments[:1] == ["--version"]:  # what one tries first
        arguments[0] = "version"
    from allranks.cli.app import make_app

    make_app(arguments)(arguments, prog_name="allranks")
