"""Does docs/reference/run-object.md name every method of a run and every public name?"""

from __future__ import annotations

from pathlib import Path

import allranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "run-object.md").read_text()
# Called by our own parts, not by users.
INNER = {"after_iteration", "close"}


def test_run_then_the_page_names_every_method() -> None:
    names = {name for name in dir(allranks.Run) if not name.startswith("_")} - INNER
    missing = sorted(name for name in names if f"`{name}`" not in PAGE and f"`{name}(" not in PAGE)
    assert not missing, f"not in docs/reference/run-object.md: {missing}"


def test_public_names_then_the_page_tells_what_each_is() -> None:
    missing = [n for n in allranks.__all__ if n not in PAGE and n != "start"]
    assert not missing
