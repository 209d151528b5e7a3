"""`allranks run`: start a script on every rank."""

from __future__ import annotations

import os
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Launch with these arguments; gives back the exit code."""
    from allranks.run.launch import launch

    return launch(arguments, dict(os.environ))


def command() -> None:
    """Only for the list of commands: `allranks run` is parsed by allranks.run.options."""
