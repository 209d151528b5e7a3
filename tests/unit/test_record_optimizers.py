"""Are steps of optimizers counted once each, also where one steps another inside, or raised before?"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.record import fingerprints, probe_training, states
from allranks.record import layout as at
from allranks.record.writer import Writer

Step = Callable[[Callable[[], Any]], None]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Writer:
    made = Writer()
    made.mark(at.PYTHON)
    monkeypatch.setattr(probe_training, "_writer", made)
    monkeypatch.setattr(states, "next_note_step", states.NEVER)
    monkeypatch.setattr(fingerprints, "next_step", states.NEVER)
    return made


@pytest.fixture
def new_optimizer(record: Writer) -> Callable[[], Step]:
    """Makes an optimizer: what it is called with is what its step does, between its hooks."""
    hooks: list[Callable[..., None]] = []
    probe_training.mark_optimizers(
        SimpleNamespace(
            register_optimizer_step_pre_hook=hooks.append, register_optimizer_step_post_hook=hooks.append
        )
    )

    def wrapper(own: object, does: Callable[[], Any]) -> None:
        hooks[0](own, (), {})
        does()
        hooks[1](own, (), {})

    def make() -> Step:
        own = object()
        return lambda does: wrapper(own, does)

    return make


def test_optimizer_when_it_steps_another_inside_then_one_step(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    sharded, inner = new_optimizer(), new_optimizer()
    for _ in range(3):
        sharded(lambda: inner(lambda: None))
    assert record.step == 3 and record.words[at.W_PHASE] == at.PYTHON


def test_optimizer_when_another_raised_before_then_its_steps_count(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    broken, whole = new_optimizer(), new_optimizer()

    def fails() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        broken(fails)
    for _ in range(3):
        record.mark(record.mark(at.FORWARD))
        whole(lambda: None)
    assert record.step == 3 and record.words[at.W_PHASE] == at.PYTHON
