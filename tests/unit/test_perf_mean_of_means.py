"""Are means over unequal numbers of samples named, and is nothing said where samples count the same, or nearly, or on purpose?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allranks.perf.history import read_history
from allranks.perf.mean_of_means import facts_of, find
from allranks.perf.remarks import find_remarks
from allranks.perf.summary import summary
from support.histories import Doing, write_history
from support.noted import LINE, codes, said

Notes = list[dict[str, Any]]
SECOND = "/home/ann/train.py:31 main"


def row(
    samples: int, weight: float = 0.5, *, items: int = 0, batch: int = 0, last: int = 0, source: int = 0
) -> list[Any]:
    return [source, samples, batch, items or 10 * samples, weight, last]


def note(step: int, *rows: list[Any], op: str = "NllLoss", targets: bool = False) -> dict[str, Any]:
    return {"kind": "weights", "step": step, "op": op, "targets": targets, "lines": [LINE, SECOND, LINE], "rows": list(rows)}  # fmt: skip


def every(*rows: list[Any], steps: int = 6, **more: Any) -> Notes:
    """One rank whose steps are all alike."""
    return [note(step, *rows, **more) for step in range(1, steps + 1)]


UNEQUAL = [every(row(2), row(30)), every(row(5), row(11))]


def test_means_when_each_micro_batch_counts_the_same_then_counts_ranks_error_line_and_fix_are_said() -> None:
    verdict = said(*UNEQUAL)
    assert (verdict.code, verdict.ranks, verdict.step, verdict.confidence) == ("AR727", (0, 1), 4, "likely")
    assert (
        "each micro-batch counts the same, of 2 samples or of 30: one sample counts up to 15 times"
        in verdict.head()
    )
    assert verdict.where == ("/home/ann/train.py:27 in main",)
    assert (
        verdict.facts[0]
        == "in step 4: samples in each mean (NllLoss, times 0.5): 2 and 30 on rank 0, 5 and 11 on rank 1"
    )
    assert verdict.facts[1].startswith("38% of the step's weight is with the wrong samples")
    assert "reduction='sum'" in verdict.fix


@pytest.mark.parametrize(
    "ranks, says",
    [
        ([every(row(8, 1.0)), every(row(32, 1.0))], "each rank's batch counts the same, of 8 samples or of 32"),
        (
            [every(row(8), row(8)), every(row(32), row(32))],
            "each micro-batch counts the same, of 8 samples or of 32",
        ),
        (  # divided by the rank's own number of samples, or of micro-batches
            [every(row(8, 0.25), row(24, 0.75)), every(row(4, 1.0))],
            "each rank counts the same, of 4 samples or of 32",
        ),
        ([every(*[row(16, 0.25)] * 4), every(row(16, 1.0))], "each rank counts the same, of 16 samples or of 64"),
        ([every(row(2, batch=32), row(30, batch=32)), every(row(16), row(16))], "of 2 samples or of 30"),
        ([every(row(2, batch=2), row(30, batch=30)), every(row(16), row(16))], "of 2 samples or of 30"),
    ],
)  # fmt: skip
def test_means_of_ranks_or_of_pieces_then_they_are_named(ranks: list[Notes], says: str) -> None:
    assert says in said(*ranks).head()


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([every(row(16), row(16))] * 2, id="equal"),
        pytest.param([every(row(16), row(16)), every(row(16), row(16), row(16))], id="one rank has more of them"),
        pytest.param([every(row(2, 2 / 48), row(30, 30 / 48)), every(row(5, 5 / 48), row(11, 11 / 48))], id="weighed by count"),
        pytest.param([every(row(16), row(16), row(16), row(12))] * 2, id="nearly equal"),
        pytest.param([every(*[row(16)] * 8, row(6))] * 2, id="little of the weight is wrong"),
        pytest.param([every(row(32), row(32), row(32), row(5, last=1))] * 2, id="the last batch of a pass"),
        pytest.param([every(row(32))[:4] + [note(s, row(5, last=1)) for s in (5, 6)], every(row(32))], id="now and then"),
        pytest.param([every(row(4, 1.0)), every(row(32, 0.3))], id="weights of another meaning"),
        pytest.param([every(row(16, 1.0), row(112, 1.0, source=1))] * 2, id="labelled and unlabelled"),
        pytest.param([every(row(8), row(64, source=2))] * 2, id="tasks with loaders of their own"),
        pytest.param([every(row(2, items=50)), every(row(20, items=50))], id="batches of equal length in tokens"),
        pytest.param([every(row(2, items=50)), every(row(20, items=700))], id="how many values a sample has differs"),
        pytest.param([every(row(500, batch=4)), every(row(100, batch=4))], id="nodes of graphs"),
        pytest.param([every(row(0, items=20)), every(row(0, items=200))], id="samples are not known"),
        pytest.param([every(row(2)), every(row(30), op="Mean")], id="other losses"),
        pytest.param([every(row(2), steps=2), every(row(30), steps=2)], id="too few steps"),
        pytest.param([every(row(2)), [note(s, row(30)) for s in range(11, 16)]], id="no steps in common"),
        pytest.param([every(row(2)), []], id="a rank that says nothing"),
        pytest.param([every(row(2), row(30))], id="one rank"),
    ],
)  # fmt: skip
def test_means_when_samples_count_the_same_or_it_is_not_known_then_nothing_is_said(
    ranks: list[Notes],
) -> None:
    assert codes(*ranks) == []


def test_means_when_ranks_are_many_then_the_first_are_shown() -> None:
    found = find({rank: every(row(rank + 1)) for rank in range(6)}, 6)
    assert found is not None
    assert found.facts()[0].endswith("1 on rank 0, 2 on rank 1, 3 on rank 2, 4 on rank 3, and 2 ranks more")


# --- targets ---


def masked(*counts: int, steps: int = 8) -> Notes:
    """Of each micro-batch of 4 samples, so many targets count."""
    return every(*[row(4, items=n) for n in counts], steps=steps, targets=True)


def remarks(folder: Path, *ranks: Notes) -> list[Any]:
    return find_remarks(read_history(write_history(folder, [Doing(facts=facts_of(own)) for own in ranks])))


def test_targets_when_they_count_unequally_then_it_is_a_remark_and_no_alarm(tmp_path: Path) -> None:
    ranks = [masked(100, 900), masked(300, 700)]
    assert codes(*ranks) == []
    (remark,) = remarks(tmp_path, *ranks)
    assert (remark.code, remark.ranks) == ("AR727", (0, 1))
    assert (
        remark.title
        == "likely: each micro-batch counts the same, of 100 targets or of 900: one target counts up to 9 times as much as another"
    )
    assert remark.facts[-1] == "backward at train.py:27 main"
    assert any(line.startswith("AR727 likely: ") for line in summary(read_history(tmp_path)))


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([masked(500, 600), masked(550, 400)], id="vary a little"),
        pytest.param([masked(100, 900, steps=5), masked(300, 700, steps=5)], id="too few steps"),
        pytest.param([every(row(4, 1.0, items=4), targets=True), every(row(16, 1.0, items=16), targets=True)], id="said already"),
        pytest.param([masked(500)[:5] + masked(100)[5:], masked(500)], id="now and then"),
    ],
)  # fmt: skip
def test_targets_when_they_vary_little_or_seldom_then_nothing_is_remarked(
    tmp_path: Path, ranks: list[Notes]
) -> None:
    assert remarks(tmp_path, *ranks) == []
