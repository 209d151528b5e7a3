"""Which command was asked for? A typer application that imports only the command that is going to run."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence

import typer
from typer.core import TyperCommand

from allranks.cli import COMMANDS

ABOUT = "From one GPU to every rank: start, watch and explain PyTorch training on many devices."


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """The application, with the real function of the command in `arguments` and the names of the others."""
    _refuse_unknown(arguments)
    app = typer.Typer(help=ABOUT, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
    for name, module, help in COMMANDS:
        function: Callable[..., None] = _not_loaded
        settings: dict[str, bool] | None = None
        cls: type[TyperCommand] | None = None
        if arguments and arguments[0] == name:
            loaded = importlib.import_module(module)
            function, settings = loaded.command, getattr(loaded, "CONTEXT_SETTINGS", None)
            cls = getattr(loaded, "Command", None)
        app.command(name, cls=cls, help=help, context_settings=settings)(function)

    @app.callback()
    def about() -> None:
        pass

    return app


def _not_loaded() -> None:
    """Stands for a command that was not asked for."""


def _refuse_unknown(arguments: Sequence[str]) -> None:
    names = [name for name, _, _ in COMMANDS]
    if not arguments or arguments[0].startswith("-") or arguments[0] in names:
        return
    near = difflib.get_close_matches(arguments[0], names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    print(f"allranks: no command {arguments[0]!r}; {hint}", file=sys.stderr)
    sys.exit(2)
