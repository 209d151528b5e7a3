"""`allranks version`: what belongs in a report."""

from __future__ import annotations

import json as jsonlib
import platform

import typer


def command(json: bool = typer.Option(False, "--json", help="One JSON object.")) -> None:
    """Show the versions of allranks, torch, python and the system."""
    from allranks.run.journal import versions

    found = {**versions(), "system": platform.platform()}
    if json:
        typer.echo(jsonlib.dumps({"version": 1, **found}))
    else:
        for name, value in found.items():
            typer.echo(f"{name:<9} {value}")
