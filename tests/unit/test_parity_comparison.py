"""Are two recordings compared as the reference page says? Recordings are made by hand here; no torch, no ranks."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.core.errors import ResultError
from allranks.parity import report, runner
from allranks.parity.compare import compare, mean_loss
from allranks.parity.options import RecordOptions
from allranks.parity.recording import Batch, Loss, Pass, Print, RankRecord, Recording, Step, read


def tensor(name: str, values: Sequence[float], numel: int | None = None) -> dict[str, Print]:
    """The fingerprint of a small tensor, by its name."""
    array = np.array(values, dtype=np.float64)
    squares = float((array * array).sum())
    return {name: Print(name, numel or len(array), "float64", float(array.sum()), squares, array)}


def step(number: int, ids: Sequence[int], gradient: Sequence[float] = (1.0, 2.0), **changes: Any) -> Step:
    """One update on one rank."""
    made = Step(
        number=number,
        optimizer=0,
        rates=(0.1,),
        batches=(Batch(0, len(ids), tuple(ids), None, ""),),
        losses=(Loss(1.0, len(ids), False),),
        layers=(),
        dropouts={},
        gradients=tensor("w", gradient),
        weights=tensor("w", (float(number), 1.0)),
        buffers={},
    )
    return replace(made, **changes)


def recording(*ranks: list[Step], passes: Sequence[Sequence[int]] = ()) -> Recording:
    """The ranks of a run; `passes` are the samples each rank evaluated."""
    records = []
    for rank, steps in enumerate(ranks):
        seen = [Pass(7, tuple(passes[rank]), len(steps))] if passes else []
        records.append(
            RankRecord(
                rank, len(ranks), steps=steps, passes=seen, initial=tensor("w", (0.0, 1.0)), end="updates"
            )
        )
    return Recording(records)


ONE = recording([step(1, [0, 1, 2, 3]), step(2, [4, 5, 6, 7])])


def many(**changes: Any) -> Recording:
    """Two ranks that are equal to ONE, with changes in rank 1's second update."""
    rank_1 = [step(1, [2, 3]), step(2, [6, 7], **changes)]
    return recording([step(1, [0, 1]), step(2, [4, 5])], rank_1)


def test_compare_when_shares_make_the_whole_then_equal() -> None:
    answer = runner.judge(ONE, many())
    assert answer.finding is None
    assert (answer.result.equal_updates, answer.result.largest.size) == (2, 0.0)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"rates": (0.2,)}, "AR711", "0.1 on rank 0 and 0.2 on rank 1"),
        (
            {"gradients": tensor("w", (1.0, 2.5))},
            "AR710",
            "1 of 1 parameters differ between ranks after update 2: w",
        ),
        (
            {"losses": (Loss(1.0, 2, False), Loss(1.0, 2, False))},
            "AR712",
            "rank 1 went backward 2 times for update 2",
        ),
        ({"batches": (Batch(0, 2, (6, 6), None, ""),)}, "AR701", "6 more often"),
    ],
    ids=["AR711", "AR710", "AR712", "AR701"],
)
def test_judge_when_a_rank_differs_then_update_and_cause(
    changes: dict[str, Any], code: str, words: str
) -> None:
    answer = runner.judge(ONE, many(**changes))
    assert answer.finding is not None
    assert (answer.finding.code, answer.finding.update) == (code, 2), answer.finding
    assert words in answer.finding.what
    assert answer.result.equal_updates == 1


def test_judge_when_a_buffer_alone_differs_then_said() -> None:
    one = recording([step(1, [0, 1, 2, 3], buffers=tensor("centre", (1.0,)))])
    two = recording(*[[step(1, ids, buffers=tensor("centre", (1.5,)))] for ids in ([0, 1], [2, 3])])
    finding = runner.judge(one, two).finding
    assert finding is not None and (finding.code, finding.tensor) == ("AR713", "centre")


def test_judge_when_only_the_optimizer_did_something_else_then_unknown_and_the_tensor() -> None:
    two = recording(*[[step(1, ids, weights=tensor("w", (3.0, 1.0)))] for ids in ([0, 1], [2, 3])])
    finding = runner.judge(ONE, two).finding
    assert finding is not None and (finding.code, finding.tensor) == ("AR700", "w")


@pytest.mark.parametrize(("ranks", "factor"), [(2, 2.0), (2, 0.5), (4, 4.0), (3, 1 / 3)])
def test_judge_when_all_gradients_have_one_factor_then_it_is_named(ranks: int, factor: float) -> None:
    shares = [[r] for r in range(ranks)]
    one = recording([step(1, list(range(ranks)))])
    two = recording(*[[step(1, share, (factor, 2 * factor))] for share in shares])
    finding = runner.judge(one, two).finding
    shown = f"{factor:.0f}" if factor > 1 else f"1/{1 / factor:.0f}"
    assert finding is not None and finding.code == "AR708"
    assert f"every gradient is {shown} times" in finding.what


def test_judge_when_ranks_make_unequal_numbers_of_updates_then_the_rank_is_named() -> None:
    two = recording([step(1, [0, 1]), step(2, [4, 5])], [step(1, [2, 3])])
    finding = runner.judge(ONE, two).finding
    assert finding is not None and (finding.code, finding.rank) == ("AR712", 1)


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        (([0, 2, 4], [1, 3, 0]), "counts 6 samples on 2 ranks for 5 on one: 0 more than once"),
        (([0, 2], [1, 3]), "4 samples on 2 ranks for 5 on one: 4 not at all"),
    ],
    ids=["repeated", "missing"],
)
def test_judge_when_an_evaluation_counts_other_samples_then_which(passes: Any, words: str) -> None:
    one = recording([step(1, [0, 1])], passes=[[0, 1, 2, 3, 4]])
    finding = runner.judge(one, recording([step(1, [0])], [step(1, [1])], passes=passes)).finding
    assert finding is not None and finding.code == "AR701"
    assert words in finding.what


@pytest.mark.parametrize(
    "passes", [([0, 2, 4], [1, 3]), ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), ([4, 3, 2, 1, 0], [])]
)
def test_judge_when_an_evaluation_counts_each_sample_once_then_equal(passes: Any) -> None:
    one = recording([step(1, [0, 1])], passes=[[0, 1, 2, 3, 4]])
    two = recording([step(1, [0])], [step(1, [1])], passes=passes)
    if not passes[1]:
        two.ranks[1].passes.clear()  # rank 0 evaluates alone
    assert runner.judge(one, two).finding is None


def test_compare_when_rounding_differs_then_equal_and_the_largest_is_told() -> None:
    two = recording(*[[step(1, ids, (1.0 + 1e-12, 2.0))] for ids in ([0, 1], [2, 3])])
    result = compare(recording([step(1, [0, 1, 2, 3])]), two)
    assert result.case is None
    assert 1e-13 < result.largest_gradient.size < 1e-12


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(0, 9))
def test_mean_loss_when_a_batch_is_cut_in_any_way_then_the_mean_of_its_samples(
    parts: list[tuple[float, int]], cut: int
) -> None:
    losses = [Loss(value, weight, False) for value, weight in parts]
    samples = [value for value, weight in parts for _ in range(weight)]
    cut = cut % (len(samples) + 1)
    pieces = [Loss(sum(piece), len(piece), True) for piece in (samples[:cut], samples[cut:])]
    assert mean_loss(losses) == pytest.approx(sum(samples) / len(samples), abs=1e-9)
    assert mean_loss(pieces) == pytest.approx(mean_loss(losses), abs=1e-9)


def test_distance_when_entries_are_left_out_then_scaled_and_hidden_changes_show_in_the_sum() -> None:
    few = tensor("w", [1.0, 1.0], numel=200)["w"]
    moved = tensor("w", [1.0, 2.0], numel=200)["w"]
    hidden = replace(few, sum=few.sum + 5.0)
    assert few.distance(moved) == pytest.approx(10.0)
    assert few.distance(hidden) > 0
    assert few.distance(few) == 0
    nan = tensor("w", [float("nan"), 1.0])["w"]
    assert nan.distance(nan) == 0 and nan.distance(tensor("w", [0.0, 1.0])["w"]) == float("inf")


def test_report_when_they_part_then_text_json_and_plot_name_the_cause() -> None:
    answer = runner.judge(ONE, many(rates=(0.2,)))
    told = (answer.one, answer.many, answer.result, answer.finding, ["a note"])
    text = report.as_text(*told)
    assert "AR711 update 2" in text and "<- differs" in text and "note: a note" in text
    data = json.loads(json.dumps(report.as_json(*told)))
    assert (data["schema"], data["equal"], data["cause"]["code"]) == ("allranks-parity/1", False, "AR711")
    svg = ET.fromstring(report.as_svg(answer.result, 2, answer.finding))
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert "AR711" in "".join(svg.itertext())


def write(folder: Path, rank: int, world_size: int, tail: str = "") -> None:
    """A recording of one update, as a rank writes it."""
    row = ["w", 2, "float64", 3.0, 5.0, 0, 2]
    update = {
        "event": "step", "number": 1, "optimizer": 0, "rates": [0.1], "batches": [[0, 1, [rank], None, ""]],
        "losses": [[1.0, 1, False]], "layers": [], "dropouts": {}, "autocast": "", "uses_library": False,
        "gradients": [row], "weights": [row], "buffers": [],
    }  # fmt: skip
    lines = [{"event": "start", "world_size": world_size}, update]
    (folder / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n" + tail)
    np.array([1.0, 2.0]).tofile(folder / f"rank{rank}.values")


def test_read_when_a_rank_was_killed_while_writing_then_its_whole_lines_count(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    write(tmp_path, 1, 2, tail='{"event": "step", "numb')
    found = read(tmp_path)
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert found.num_updates == 1 and found.ranks[1].end == ""
    assert found.ranks[1].steps[0].gradients["w"].values.tolist() == [1.0, 2.0]


def run_with(monkeypatch: pytest.MonkeyPatch, ranks_written: int) -> runner.Answer:
    """runner.run with runs that record `ranks_written` ranks at most and then fail."""

    def record(wish: runner.Wish, folder: Path, num_ranks: int, options: RecordOptions) -> str:
        folder.mkdir()
        (folder / "options.json").write_text(options.as_json())
        for rank in range(min(num_ranks, ranks_written)):
            write(folder, rank, num_ranks)
        return "exit code 1: a traceback"

    monkeypatch.setattr(runner, "_record", record)
    return runner.run(runner.Wish(script="train.py"), lambda text: None)


def test_run_when_nothing_was_recorded_then_ar720_with_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResultError, match="AR720") as caught:
        run_with(monkeypatch, 0)
    assert "a traceback" in str(caught.value)


def test_run_when_a_run_fails_and_nothing_differs_then_ar721(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner, "judge", lambda one, many, tolerance: runner.Answer(one, many, compare(one, one), None, [])
    )
    with pytest.raises(ResultError, match="AR721 a run failed after 1 equal updates"):
        run_with(monkeypatch, 2)
