"""Is what is wrong in silence named from what ranks noted, and is nothing said of what is as it should be?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from allranks.record.fingerprints import RATE
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Rank, Record, from_json
from allranks.watch.noted import MAX_WAIT_S, SETTLE_S, Noted
from allranks.watch.observed import Check, NotFinite
from allranks.watch.rows import Row
from support.noted import LINE, MODEL, codes, evidence, said

# --- training ---


def test_gradient_when_not_finite_then_the_first_rank_and_the_highest_layer_are_named() -> None:
    note = {
        "kind": "gradient",
        "step": 22,
        "bad": ["head.bias", "stem.weight"],
        "num_bad": 4,
        "num": 6,
        "sound": ["out.bias"],
    }
    verdict = said([note | {"is_exact": True}], [note | {"step": 21, "is_exact": True}])
    assert (verdict.code, verdict.ranks, verdict.step) == ("AR732", (1,), 21)
    assert "gradient of head.bias" in verdict.head()
    assert verdict.others.startswith("rank 0 has it since a later step")


def never(**more: Any) -> dict[str, Any]:
    return {
        "kind": "never_averaged",
        "why": "module",
        "step": 3,
        "line": LINE,
        "sums": [["0.weight", 1]],
        "names": 1,
    } | more


def test_averaging_when_it_never_happened_then_the_call_and_the_parameter_are_named() -> None:
    verdict = said([never()], [never(sums=[["0.weight", 2]])])
    assert verdict.code == "AR733"
    assert "parameter 0.weight" in verdict.where
    assert codes([never()], [never()]) == []  # the replicas are equal: somebody averages


def buffers(step: int, value: int) -> dict[str, Any]:
    return {
        "kind": "buffers",
        "step": step,
        "seq": step,
        "rows": [["book", value, [value / 10]]],
        "broadcast": True,
    }


def test_buffers_when_they_differ_at_every_check_then_named_with_how_far() -> None:
    verdict = said(*([buffers(s, s + 3 * r) for s in (1, 2, 8)] for r in (0, 1)))
    assert verdict.code == "AR736"
    assert "up to 0.3" in verdict.facts[0]
    assert codes(*([buffers(s, s + (3 * r if s == 2 else 0)) for s in (1, 2, 8)] for r in (0, 1))) == []


def test_parameters_when_never_trained_then_only_what_all_ranks_say() -> None:
    note = {
        "kind": "never",
        "names": ["aux.bias", "aux.weight"],
        "count": 2,
        "step": 40,
        "looks": 6,
        "flag": True,
    }
    assert (
        "aux.bias never receives a gradient"
        in said([note], [note | {"names": ["aux.bias"], "count": 1}]).head()
    )
    assert codes([note], []) == []


def test_scheduler_when_stepped_once_per_rank_then_named() -> None:
    note = {
        "kind": "scheduler",
        "name": "LinearLR",
        "line": LINE,
        "per_step": 2,
        "calls": 10,
        "steps": 5,
        "rates": [0.0],
    }
    assert "10 steps of the scheduler for 5 of the optimizer" in said([note], [note]).facts[0]


def saved(**more: Any) -> dict[str, Any]:
    return {
        "kind": "saved",
        "path": "/data/last.pt",
        "line": LINE,
        "step": 20,
        "issued": 4,
        "unix_s": 100.0,
    } | more


def test_file_when_several_ranks_write_it_at_once_then_named() -> None:
    assert "/data/last.pt" in said([saved()], [saved(unix_s=100.3)]).head()


@pytest.mark.parametrize(
    "other", [{"issued": 5}, {"unix_s": 130.0}, {"path": "/data/last-1.pt"}, {"step": 21}]
)
def test_file_when_ranks_take_turns_or_have_their_own_then_silent(other: dict[str, Any]) -> None:
    assert codes([saved()], [saved(**other)]) == []


def test_rates_when_they_differ_then_they_are_the_verdict_not_the_parameters() -> None:
    bits = {0.1: 4591870180066957722, 0.001: 4562254508917369340}

    def record(rate: float, weight: int) -> Record:
        rows = {s: (bits[0.1], s) if s < 8 else (bits[rate], weight) for s in (2, 4, 8, 16)}
        checks = tuple(Check(s, s, s if s < 8 else weight + s, rows[s]) for s in rows)
        return Record(step=40, checks=checks, checked=(RATE, "0.weight"))

    ranks = tuple(
        Rank(n, "gpu-a", state="R", record=r) for n, r in enumerate((record(0.1, 1), record(0.001, 2)))
    )
    verdict = decide(Evidence(2, ranks, trigger="numbers"))
    assert verdict is not None
    assert verdict.code == "AR735"
    assert "0.1 on rank 0, 0.001 on rank 1, since a check between step 4 and 8" in verdict.head()


def test_drift_when_only_later_unfrozen_parameters_differ_then_that_is_said() -> None:
    def record(weight: int, num_steps: int = 8) -> Record:
        checks = tuple(Check(s, s, weight + s, (weight, 3), num_steps=num_steps) for s in (4, 8))
        return Record(step=40, checks=checks, checked=("0.weight", "2.weight"), model=MODEL)

    ranks = tuple(Rank(n, "gpu-a", state="R", record=record(n)) for n in (0, 1))
    verdict = decide(Evidence(2, ranks, trigger="numbers"))
    assert verdict is not None
    assert verdict.code == "AR734"
    trained = replace(MODEL, parameters=("0.weight float32 [4, 4] trained",))
    ranks = tuple(
        Rank(n, "gpu-a", state="R", record=replace(record(n, 8 - n), model=trained)) for n in (0, 1)
    )
    verdict = decide(Evidence(2, ranks, trigger="numbers"))
    assert verdict is not None
    assert verdict.code == "AR731"
    assert "8 on rank 0, 7 on rank 1" in " ".join(verdict.facts)


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (
            {"place": "input", "rows": [3], "of": 8, "samples": [327], "is_row": True},
            "sample 3 of 8 in the batch",
        ),
        (
            {"place": "parameter", "name": "0.weight", "count": 4, "samples": []},
            "parameter 0.weight was not finite already",
        ),
        (
            {"place": "loss", "operation": "log", "after": "2.bias", "samples": [1]},
            "the loss function made it: log made it, after 2.bias",
        ),
    ],
)
def test_nan_when_its_origin_was_noted_then_it_is_said(note: dict[str, Any], text: str) -> None:
    noted = {"kind": "not_finite", "step": 31, "is_row": False} | note
    found = evidence([noted], [], trigger="numbers")
    first, second = found.ranks
    bad = replace(first, record=replace(first.record or Record(), not_finite=NotFinite(31)))
    verdict = decide(replace(found, ranks=(bad, second)))
    assert verdict is not None
    assert text in " ".join(verdict.facts)


# --- when to look ---


def test_trigger_when_notes_have_grown_then_it_looks_once_they_have_settled() -> None:
    noted, rows = Noted(), {n: Row(n, "R", notes=0) for n in range(2)}
    assert noted.look(rows, 0.0) == ()
    rows[0] = replace(rows[0], notes=100)
    assert noted.look(rows, 1.0) == ()
    assert noted.look(rows, 1.1 + SETTLE_S) == (0, 1)
    assert noted.look(rows, 9.0) == ()


def test_trigger_when_notes_grow_all_the_time_then_it_looks_all_the_same() -> None:
    noted, looks, now = Noted(), 0, 0.0
    for size in range(1, 40):
        now += 0.1
        looks += bool(noted.look({0: Row(0, "R", notes=size)}, now))
    assert looks >= 3.9 // (MAX_WAIT_S + 0.1)


def test_evidence_when_it_goes_to_json_and_back_then_notes_are_the_same() -> None:
    before = evidence([saved()], [never()])
    assert from_json(Evidence, before.to_json()) == before


# --- gathers, means, windows ---


def test_gather_into_one_tensor_then_the_line_is_named() -> None:
    note = {"kind": "aliased", "line": LINE, "count": 2, "shape": [8, 4]}
    verdict = said([note], [note])
    assert (verdict.code, verdict.ranks) == ("AR722", (0, 1))
    assert "entries 0 and 1 are the same" in verdict.head()
    assert LINE.split()[0].rpartition("/")[2] in verdict.where[0]


def test_mean_cut_off_then_the_exact_one_and_the_used_one_are_named() -> None:
    note = {"kind": "floored", "line": LINE, "dtype": "int64", "sums": [4, 42], "used": [1, 10], "ranks": 4}
    verdict = said([note], [note])
    assert (verdict.code, verdict.confidence) == ("AR723", "likely")
    assert "10 for 10.5, in a tensor of int64" in verdict.head()


def test_rest_of_a_pass_thrown_away_then_how_much_and_where_are_named() -> None:
    note = {
        "kind": "left_over", "line": LINE, "micro_steps": 2, "window": 4, "step": 4, "drawn": 10, "loop": LINE.replace("27", "25"),
    }  # fmt: skip
    verdict = said([note], [note])
    assert verdict.code == "AR724"
    assert "2 of 10 micro-steps of a pass have no effect" in verdict.head()
    assert "2 optimizer steps instead of 3" in verdict.facts[0]
    assert "the last 2 micro-steps" in said([note | {"drawn": -1}], [note | {"drawn": -1}]).head()


def test_gradient_through_the_own_entry_then_the_factor_is_named_if_all_ranks_say_so() -> None:
    note = {"kind": "own_entry", "line": LINE, "ranks": 2}
    verdict = said([note], [note])
    assert (verdict.code, verdict.confidence) == ("AR725", "likely")
    assert "1/2 of it is left" in verdict.head()
    assert codes([note], []) == []  # one rank alone: its loss is its own


def test_names_that_match_nothing_then_how_many_and_the_first_on_either_side_are_named() -> None:
    note = {
        "kind": "unmatched", "line": LINE, "what": "self.shadow", "names": 4, "keys": 4, "first": "module.0.weight", "other": "0.weight",
        "calls": 2,
    }  # fmt: skip
    verdict = said([note], [note])
    assert (verdict.code, verdict.ranks) == ("AR728", (0, 1))
    assert (
        "0 of 4 names matched: self.shadow has 0.weight, the loop looks for module.0.weight" in verdict.head()
    )
    assert verdict.where == ("/home/ann/train.py:27 in main",)
