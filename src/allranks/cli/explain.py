"""`allranks explain AR204`: the page of one cause."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import typer

import allranks


def command(
    code: str = typer.Argument("", help="The code, such as AR204; without one, the list of all."),
) -> None:
    """Show what a code means, why it happens and what to do."""
    folder = pages()
    if not code:
        for page in sorted(folder.glob("AR*.md")):
            typer.echo(page.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# "))
        return
    wanted = normal(code)
    page = folder / f"{wanted}.md"
    if not page.is_file():
        near = ", ".join(p.stem for p in sorted(folder.glob(f"{wanted[:4]}*.md")))
        print(
            f"allranks: there is no page {wanted}" + (f"; near it: {near}" if near else ""), file=sys.stderr
        )
        raise typer.Exit(2)
    typer.echo(page.read_text(encoding="utf-8").rstrip())


def normal(code: str) -> str:
    """AR204 from ar204, 204, AR204."""
    digits = re.sub(r"\D", "", code)
    return f"AR{int(digits):03d}" if digits else code.upper()


def pages() -> Path:
    """The folder of pages: in the wheel beside the package, in a clone docs/causes."""
    package = Path(allranks.__file__).parent
    installed = package / "pages"
    return installed if installed.is_dir() else package.parents[1] / "docs" / "causes"
