"""Are wrong numbers told of the right rank, once, and not where ranks differ by design?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.record import layout as at
from allranks.record import pace, ticking
from allranks.record.states import QUICK_STEP_NS
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Rank, Record
from allranks.watch.numbers import LOOKED_S, PATIENCE_S, Numbers, has_drifted
from allranks.watch.observed import Check, NotFinite
from allranks.watch.rows import Row
from allranks.watch.tracing import made_at
from allranks.watch.trigger import Trigger
from allranks.watch.verdict import Place, Verdict

LINE = Place("/home/ann/train.py", 27, "main", "loss.backward()")
NAMES = ("stem.weight", "head.weight")


def evidence(*records: Record, trigger: str = "numbers") -> Evidence:
    ranks = tuple(Rank(n, "gpu-a", pid=100 + n, state="R", record=r) for n, r in enumerate(records))
    return Evidence(len(records), ranks, trigger=trigger)


def said(*records: Record, trigger: str = "numbers") -> Verdict:
    verdict = decide(evidence(*records, trigger=trigger))
    assert verdict is not None
    return verdict


def bad(step: int, kind: str = "nan") -> Record:
    return Record(step=step + 3, not_finite=NotFinite(step, kind, LINE))


def replica(*checks: tuple[int, int, int], steps_apart: int = 10) -> Record:
    """One check for each (stem, head, changes of head), after steps 10, 20 ..."""
    found = tuple(
        Check(n * steps_apart, n * 20, hash((stem, head)), (stem, head), (n * steps_apart, changes))
        for n, (stem, head, changes) in enumerate(checks, 1)
    )
    return Record(step=100, checks=found, checked=NAMES)


SOUND = ((1, 1, 10), (2, 2, 20), (3, 3, 30), (4, 4, 40))


# --- a loss that is not finite ---


def test_nan_when_it_spreads_then_the_rank_of_the_first_step_is_named() -> None:
    verdict = said(bad(32), bad(31), bad(32))
    assert (verdict.code, verdict.ranks, verdict.step) == ("AR730", (1,), 31)
    assert verdict.head() == "AR730 rank 1 on gpu-a: the loss became nan first, at step 31"
    assert verdict.others == "ranks 0 and 2 have it since a later step: a consequence"
    assert verdict.where[0] == "/home/ann/train.py:27 in main:  loss.backward()"
    assert verdict.can_go_on


def test_nan_when_the_others_are_well_then_only_the_one_rank_is_named() -> None:
    verdict = said(Record(step=40), bad(31, "inf"))
    assert verdict.ranks == (1,)
    assert "became inf first" in verdict.head()
    assert verdict.others == ""


def test_nan_when_on_all_ranks_in_one_step_then_no_rank_is_blamed() -> None:
    verdict = said(bad(31), bad(31, "inf"))
    assert verdict.ranks == (0, 1)
    assert "became inf or nan at step 31, on all ranks at once" in verdict.head()
    assert any("the update of step 30" in fact for fact in verdict.facts)


def test_nan_when_quick_steps_were_left_out_then_a_victim_is_not_taken_for_the_first() -> None:
    exact, quick = bad(32), Record(step=42, not_finite=NotFinite(40, "nan", LINE, sound=24))
    verdict = said(exact, quick)
    assert verdict.ranks == (0, 1)
    assert "which of them was first is not known" in verdict.head()


def test_nan_when_a_quick_rank_was_well_later_then_it_was_not_the_first() -> None:
    first, later = (Record(step=42, not_finite=NotFinite(s, "nan", LINE, sound=s - 8)) for s in (33, 41))
    verdict = said(later, first)
    assert verdict.ranks == (1,)
    assert "first, between step 26 and 33" in verdict.head()


def test_nan_when_the_look_has_another_reason_then_it_is_not_the_verdict() -> None:
    assert decide(evidence(bad(31), bad(31), trigger="silence")) is None


def test_trigger_when_a_rank_is_not_past_the_step_then_it_waits_for_it_and_tells_once() -> None:
    numbers = Numbers()
    rows = {0: Row(0, "R", step=30), 1: Row(1, "R", step=30, not_finite_step=31)}
    assert numbers.look(rows, 0.0) == ()
    rows[0] = replace(rows[0], step=31)
    assert numbers.look(rows, 0.1) == ()  # it does not look at every step, perhaps
    rows[0] = replace(rows[0], step=39)
    assert numbers.is_waiting
    assert numbers.look(rows, LOOKED_S + 0.01) == (1,)
    assert not numbers.is_waiting
    rows[0] = replace(rows[0], step=32, not_finite_step=32)
    assert numbers.look(rows, LOOKED_S + 0.1) == ()


@pytest.mark.parametrize("length_ms", [0.5, 1.5, 1.56, 3.1, 3.2, 5.9])
def test_trigger_when_quick_ranks_look_at_steps_of_their_own_then_it_waits_until_each_has_looked(
    length_ms: float,
) -> None:
    length, step, apart = int(length_ms * 1e6), 1, 0
    assert length < QUICK_STEP_NS
    while step < 20_000:
        before, step = step, at.next_timed(step, length)
        apart = max(apart, step - before)
    assert apart * length <= ticking.LOOKED_NS  # else the record's thread would have more of them looked at
    assert (
        ticking.LOOKED_NS / 1e9 + pace.LIGHT_EVERY * pace.EVERY_US / 1e6 <= LOOKED_S
    )  # where they become slower


def test_trigger_when_the_other_rank_never_comes_then_it_does_not_wait_for_ever() -> None:
    numbers = Numbers()
    rows = {0: Row(0, "R", step=30), 1: Row(1, "R", step=30, not_finite_step=31)}
    assert numbers.look(rows, 10.0) == ()
    assert numbers.look(rows, 10.1 + PATIENCE_S) == (1,)


@pytest.mark.parametrize(
    "call",
    ["loss.backward()", "scaler.scale(loss).backward()", "accelerator.backward(loss)", "run.step(loss)"],
)
def test_source_when_backward_is_called_then_the_lines_that_made_the_loss_are_found(
    call: str, tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        f"loss = 0\ndef main():\n    loss = f(x)\n    y = 1\n    loss = loss / n\n    {call}\n    loss = 3\n"
    )
    made = made_at(Place(str(file), 6, "main", call))
    assert [(place.line, place.code) for place in made] == [(5, "loss = loss / n"), (3, "loss = f(x)")]


def test_source_when_the_loss_has_no_name_then_no_line_is_guessed(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("loss = 1\nf(x).backward()\n")
    assert made_at(Place(str(file), 2, "", "f(x).backward()")) == ()


# --- replicas that drift apart ---


def test_drift_when_one_of_three_differs_then_it_is_named_with_its_parameter() -> None:
    verdict = said(replica(*SOUND), replica(*SOUND), replica(*SOUND[:2], (3, 7, 30), (4, 8, 40)))
    assert (verdict.code, verdict.ranks) == ("AR731", (2,))
    assert "head.weight on rank 2 differs from ranks 0 and 1" in verdict.head()
    assert "between step 20 and 30" in verdict.head()


def test_drift_when_two_ranks_and_one_changed_more_then_it_is_named() -> None:
    verdict = said(replica(*SOUND), replica(*SOUND[:2], (3, 7, 31), (4, 8, 41)))
    assert verdict.ranks == (1,)
    assert "10 times on rank 0, 11 times on rank 1" in verdict.facts[0]


def test_drift_when_two_ranks_and_nothing_tells_them_apart_then_both_are_named() -> None:
    verdict = said(replica(*SOUND), replica(*SOUND[:2], (3, 7, 30), (4, 8, 40)))
    assert verdict.ranks == (0, 1)
    assert "head.weight differs between rank 0 and rank 1" in verdict.head()


def test_drift_when_there_was_no_equal_check_then_no_beginning_is_claimed() -> None:
    verdict = said(replica(*SOUND[:2]), replica((1, 5, 10), (2, 6, 20)))
    assert verdict.ranks == (0, 1)
    assert "since step 10 or before" in verdict.head()


def test_drift_when_sums_are_not_known_then_it_is_told_without_a_parameter() -> None:
    def bare(record: Record) -> Record:
        return replace(
            record, checks=tuple(replace(c, sums=(), changes=()) for c in record.checks), checked=()
        )

    records = [replica(*SOUND), replica(*SOUND[:2], (3, 7, 31), (4, 8, 41))]
    assert "a parameter differs between rank 0 and rank 1" in said(*map(bare, records)).head()


def test_drift_when_numbers_are_not_finite_then_that_is_the_verdict() -> None:
    records = [replica(*SOUND), replica(*SOUND[:2], (3, 7, 30), (4, 8, 40))]
    records[1] = replace(records[1], not_finite=NotFinite(25))
    assert said(*records).code == "AR730"


@pytest.mark.parametrize(
    "own",
    [
        ((10, 20, 1), (20, 40, 2), (30, 60, 3)),  # the same
        (
            (10, 20, 1),
            (20, 40, 9),
            (30, 60, 3),
        ),  # not equal once: they were given their parameters a moment later
        ((10, 20, 1), (20, 41, 8), (30, 61, 9)),  # as many steps, of other collectives: one more optimizer
        ((11, 22, 7), (21, 42, 8), (31, 62, 9)),  # no step in common
        ((10, 20, 1), (20, 40, 2), (30, 60, 9)),  # once is no look
        (),
    ],
)
def test_drift_when_ranks_differ_by_design_then_silent(own: tuple[tuple[int, int, int], ...]) -> None:
    other = ((10, 20, 1), (20, 40, 2), (30, 60, 3))
    assert not has_drifted({0: other, 1: own})
    rows = {0: Row(0, "R", checks=other), 1: Row(1, "R", checks=own)}
    assert Trigger().look(rows, 0.0) is None


def test_drift_when_only_the_last_check_differs_then_told_at_the_end_unless_changed_by_hand() -> None:
    def ended(*checks: tuple[int, int, int]) -> Record:
        return replace(replica(*checks), exit_kind="ended")

    other = (*SOUND[:3], (4, 9, 40))
    assert said(ended(*SOUND), ended(*other)).code == "AR731"
    assert decide(evidence(replica(*SOUND), replica(*other))) is None  # it may be given its parameters yet
    assert decide(evidence(ended(*SOUND), ended(*SOUND[:3], (4, 9, 41)))) is None  # loaded its best weights
    rows = {n: Row(n, checks=((10, 20, 1), (20, 40, 5 + n))) for n in range(2)}
    assert Trigger().last(rows) == "numbers"
    assert Trigger().last({0: rows[0], 1: rows[0]}) == "notes"


def test_trigger_when_replicas_differ_twice_then_all_are_looked_at_once() -> None:
    rows = {n: Row(n, "R", checks=((10, 20, 1), (20, 40, 5 + n), (30, 60, 8 + n))) for n in range(2)}
    trigger = Trigger()
    found = trigger.look(rows, 0.0)
    assert found is not None
    assert (found.kind, found.ranks) == ("numbers", (0, 1))
    assert trigger.look(rows, 0.1) is None


def test_row_when_it_goes_to_json_and_back_then_it_is_the_same() -> None:
    row = Row(1, "R", not_finite_step=3, checks=((10, 20, 1 << 50), (20, 40, 5)))
    assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_trigger_when_all_ranks_are_bad_at_once_then_a_note_of_one_ranks_gradient_is_given_time() -> None:
    numbers = Numbers()
    rows = {n: Row(n, "R", step=31, not_finite_step=32) for n in range(2)}
    assert numbers.look(rows, 0.0) == () == numbers.look(rows, 0.4)
    assert numbers.look(rows, 0.6) == (0, 1)
    rows[1] = replace(rows[1], not_finite_step=31)
    assert Numbers().look(rows, 0.0) == (0, 1)  # rank 1 was first
