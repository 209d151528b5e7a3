"""Are notes written whole, read back, and no more than a few of a kind?"""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.record import layout as at
from allranks.record import notes, process


def test_notes_when_written_then_read_back_and_no_more_than_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "side_path", lambda suffix: str(tmp_path / f"7{suffix}"))
    notes._counts.clear()
    for number in range(notes.MAX_OF_KIND + 5):
        notes.note("pass", number=number)
    notes.note("odd", value=object())
    page = str(tmp_path / f"7{at.SUFFIX}")
    with (tmp_path / f"7{at.NOTES_SUFFIX}").open("a") as file:
        file.write('{"kind": "half')
    found = notes.read_notes(page)
    assert len(found) == notes.MAX_OF_KIND
    assert found[3] == {"kind": "pass", "number": 3}
    assert notes.size_of_notes(page) > 0
    assert notes.read_notes(str(tmp_path / "8.page")) == ()
    notes._counts.clear()
