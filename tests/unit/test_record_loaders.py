"""Do marks of a loader's batches leave iterators alone that they do not know?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allranks.record import layout as at
from allranks.record import probe_loaders
from allranks.record.writer import Writer


def test_iterator_when_it_has_the_id_of_one_that_is_gone_then_it_ends_as_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = Writer()
    record.mark(at.PYTHON)
    monkeypatch.setattr(probe_loaders, "_writer", record)
    monkeypatch.setattr(probe_loaders, "_light", record.light)

    class Batches:
        def __init__(self) -> None:
            self.left: Iterator[int] = iter((1, 2))

        def __next__(self) -> Any:
            return next(self.left)

    batches = Batches()
    draw = probe_loaders._marked_next(Batches.__next__)
    record.next_looked, record.may_be_light = 1 << 40, True
    record.end_step()
    record.light.iterator = id(batches)  # the one that began in a marked loop, and was dropped in the middle
    assert record.light.is_on and [draw(batches), draw(batches)] == [1, 2]
    # At once: a pass that has ended is compared with those of other ranks by its batches, and the process may be stopped then.
    assert record.words[at.LOADER + at.L_DRAWN] == 2
    with pytest.raises(StopIteration):
        draw(batches)
