"""Are steps of optimizers counted once each, also where one steps another inside, or raised before?"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.record import counts, fingerprints, probe_training, states
from allranks.record import layout as at
from allranks.record.light import stands_for
from allranks.record.writer import Writer

Step = Callable[[Callable[[], Any]], None]


class Optimizer:
    """One that weak references know."""


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Writer:
    made = Writer()
    made.mark(at.PYTHON)
    monkeypatch.setattr(probe_training, "_writer", made)
    monkeypatch.setattr(probe_training, "_light", made.light)
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

    stands_for(at.OPTIMIZER, wrapper)  # as of torch's own

    def make() -> Step:
        own = Optimizer()
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


def make_light(record: Writer) -> None:
    """The steps from now on have light marks, until something ends them."""
    record.next_looked = record.next_timed = 1 << 40
    record.may_be_light = True
    record.end_step()
    record.light.until = record.light.until_syncs = 1 << 40
    assert record.light.is_on


def test_optimizers_when_marks_are_light_then_each_step_counts_once_also_of_one_inside_another(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    sharded, inner, other = new_optimizer(), new_optimizer(), new_optimizer()
    other(lambda: None)
    sharded(lambda: inner(lambda: None))
    make_light(record)
    assert record.step == 3
    for _ in range(5):
        sharded(lambda: inner(lambda: None))
        other(lambda: None)
    assert record.light.is_on and (record.step, record.words[at.W_STEP]) == (13, 13)


@pytest.mark.parametrize("is_known_before", [False, True])
def test_optimizer_when_its_step_calls_that_of_its_class_then_one_step(
    record: Writer, new_optimizer: Callable[[], Step], is_known_before: bool
) -> None:
    step, before = new_optimizer(), record.step
    if is_known_before:
        step(lambda: None)
    for _ in range(3):
        step(lambda: step(lambda: None))
    make_light(record)
    for _ in range(5):
        step(lambda: step(lambda: None))
        record.end_light(monotonic_ns())
    assert record.step == before + is_known_before + 3 + 1 + 5 and record.words[at.W_PHASE] == at.PYTHON


def test_optimizer_that_is_new_when_marks_are_light_then_its_step_has_whole_ones(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    make_light(record)
    seen: list[int] = []
    new_optimizer()(lambda: seen.append(record.words[at.W_PHASE]))
    assert seen == [at.OPTIMIZER] and record.step == 2 and record.words[at.W_PHASE] == at.PYTHON


def test_step_of_an_optimizer_when_light_marks_end_in_it_then_it_counts_and_its_phase_ends(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    step = new_optimizer()
    step(lambda: None)
    make_light(record)
    seen: list[int] = []

    def lasts() -> None:
        record.end_light(monotonic_ns(), sys._getframe())  # the tick thread
        seen.append(record.words[at.W_PHASE])

    step(lasts)
    assert seen == [at.OPTIMIZER]
    assert record.step == 3 and record.words[at.W_PHASE] == at.PYTHON


def test_step_of_an_optimizer_when_the_library_counts_then_its_hooks_do_not(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    step = new_optimizer()
    record.set_step(0)
    record.is_library_stepped, record.light.is_hook_counted = True, False
    step(lambda: None)
    record.set_step(1)
    make_light(record)
    for number in range(3, 9):
        step(lambda: None)
        assert record.step == number - 1
        record.set_step(number)
        assert record.light.is_on and record.words[at.W_STEP] == number


def test_due_when_marks_are_light_then_replicas_are_compared_at_their_step_and_the_next_one_is_looked_at(
    record: Writer, new_optimizer: Callable[[], Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = new_optimizer()
    step(lambda: None)
    make_light(record)
    compared: list[int] = []
    monkeypatch.setattr(fingerprints, "take", lambda syncs, **_: compared.append(syncs))
    monkeypatch.setattr(fingerprints, "next_step", 3)
    record.next_looked = 6
    record.light.until, record.light.until_syncs = 5, 3
    while not record.is_looked:
        record.light.syncs += 1
        step(lambda: None)
    assert record.step == 5 and not record.light.is_on
    assert compared == [3]


@pytest.mark.parametrize("left", [at.OPTIMIZER, at.FORWARD, at.DATA, at.BACKWARD])
def test_phase_that_the_tick_thread_left_when_an_optimizer_steps_then_it_is_over(
    record: Writer, new_optimizer: Callable[[], Step], left: int
) -> None:
    record.words[at.W_PHASE] = left | 7 << 8  # of a call that came back while it was looked at
    new_optimizer()(lambda: None)
    assert record.words[at.W_PHASE] == at.PYTHON


def test_backward_that_goes_on_when_an_optimizer_steps_in_it_then_it_goes_on_after_it(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    step = new_optimizer()

    def marked_backward() -> None:
        before = record.mark(at.BACKWARD)
        step(lambda: None)
        assert record.words[at.W_PHASE] == at.BACKWARD
        record.mark(before)

    stands_for(at.BACKWARD, marked_backward)
    marked_backward()
    assert record.words[at.W_PHASE] == at.PYTHON


def test_backward_when_a_checkpoint_computes_anew_in_it_then_gradients_are_looked_at_after_the_whole_one(
    record: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(probe_training, "_after_backward", lambda *_: done.append("looked"))
    monkeypatch.setattr(states, "pending", object())

    def inner() -> None:
        done.append("inner")

    def whole() -> None:
        probe_training._backward(inner, (), {})
        done.append("whole")

    probe_training._backward(whole, (), {})
    assert done == ["inner", "whole", "looked"]
    assert record.words[at.W_PHASE] == at.PYTHON


def test_steps_when_counted_from_an_earlier_one_again_then_they_are_looked_at_from_there(
    record: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_writer", record)
    monkeypatch.setattr(states, "noted", (1000, 0))
    monkeypatch.setattr(states, "next_note_step", 1008)
    record.set_step(3)
    probe_training._step_ended(3)
    assert states.noted[0] == 3 and states.next_note_step <= 16


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("step_ms", "period"), [(0.5, 64), (2.0, 32), (4.0, 16), (20.0, 1)])
def test_steps_when_they_end_then_noted_some_times_a_second_at_the_same_ones_on_ranks_that_differ(
    record: Writer, monkeypatch: pytest.MonkeyPatch, step_ms: float, period: int, is_compiled: bool
) -> None:
    monkeypatch.setattr(states, "_writer", record)
    monkeypatch.setattr(states, "IS_COMPILED", is_compiled)
    monkeypatch.setattr(states, "noted", (228, 10**12))
    monkeypatch.setattr(states, "monotonic_ns", lambda: 10**12 + int(28 * step_ms * 1e6))
    light = record.light
    light.step = 256
    states.note_step_end()
    assert (light.asked_step, light.ask_every, light.ask_at) == (256, period, 256 + period)
    is_asked_between = is_compiled and period > 1
    assert states.next_note_step == 256 + (4 * period if is_asked_between else period)
    light.is_hook_counted = False  # the library counts steps, and nothing asks in between
    states.note_step_end()
    assert states.next_note_step == light.ask_at


def test_steps_when_they_were_quick_and_are_not_any_more_then_the_quick_ones_before_do_not_count(
    record: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "_writer", record)
    monkeypatch.setattr(states, "noted", (1000, 10**12))
    asked_ns = 10**12 + 200 * 10**6  # 200 steps of 1 ms, then 40 of 10
    monkeypatch.setattr(states, "monotonic_ns", lambda: asked_ns + 400 * 10**6)
    record.light.asked_step, record.light.asked_ns, record.light.step = 1200, asked_ns, 1240
    states.note_step_end()
    assert not states.is_quick and not record.may_be_light and states.next_note_step == 1241


@pytest.mark.skipif(not counts.IS_COMPILED, reason="else it is not asked between notes")
@pytest.mark.parametrize("marks", ["whole", "light", "light and compared"])
@pytest.mark.parametrize("is_quick", [False, True])
def test_steps_when_it_is_time_to_ask_then_slow_ones_are_told_long_before_the_next_note(
    record: Writer,
    new_optimizer: Callable[[], Step],
    monkeypatch: pytest.MonkeyPatch,
    marks: str,
    is_quick: bool,
) -> None:
    monkeypatch.setattr(states, "_writer", record)
    step, light = new_optimizer(), record.light
    step(lambda: None)
    if marks != "whole":
        make_light(record)
    asked_ns = 1 << 62 if is_quick else 0  # the steps since then have taken no time, or all
    monkeypatch.setattr(states, "is_quick", True)
    monkeypatch.setattr(states, "noted", (light.step, asked_ns))
    monkeypatch.setattr(states, "next_note_step", 256)
    light.asked_step, light.asked_ns, light.ask_at, light.ask_every = light.step, asked_ns, 5, 64
    while light.step < 5:
        if marks == "light and compared":
            light.until_syncs = 0  # some forwards of each step were under no_sync
        step(lambda: None)
    assert (states.noted[0] == 5, states.is_quick) == (not is_quick, is_quick)
    assert (light.asked_step, light.ask_at) == (5, 69 if is_quick else 6)


@pytest.mark.parametrize("is_light", [True, False])
def test_steps_when_they_are_not_quick_any_more_then_all_are_looked_at_and_replicas_are_compared_soon(
    record: Writer, new_optimizer: Callable[[], Step], monkeypatch: pytest.MonkeyPatch, is_light: bool
) -> None:
    for module in (states, fingerprints):
        monkeypatch.setattr(module, "_writer", record)
    monkeypatch.setattr(states, "is_quick", True)
    monkeypatch.setattr(states, "noted", (0, monotonic_ns()))
    monkeypatch.setattr(fingerprints, "_last", 1)
    monkeypatch.setattr(fingerprints, "next_step", 4096)
    step, light = new_optimizer(), record.light
    step(lambda: None)
    make_light(record)
    light.until_syncs, light.until, light.ask_at = 4096, 5, 5
    monkeypatch.setattr(states, "next_note_step", 256)
    while light.step < 5:
        light.asked_step, light.asked_ns = light.step, 0  # this one has taken long
        if not is_light:
            record.end_light(monotonic_ns())  # as a collective of the script's own would
        step(lambda: None)
    assert not states.is_quick and not light.is_on and light.until_syncs <= 16
    assert record.next_looked == record.next_timed == 7 and not record.is_looked
    step(lambda: None)
    assert record.is_looked and record.is_timed


def test_optimizer_that_is_gone_when_another_has_its_id_then_that_is_not_taken_for_it(
    record: Writer, new_optimizer: Callable[[], Step]
) -> None:
    step = new_optimizer()
    step(lambda: None)
    assert list(record.light.optimizers.values()) == [True] and record.light.optimizer
    del step
    gc.collect()
    assert not record.light.optimizers and not record.light.optimizer
