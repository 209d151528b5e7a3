"""Is a number that one rank logs as the job's remarked on, at the end of a run and in its report, and no other?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.perf.history import read_history
from allranks.perf.own_values import facts_of, find_remarks
from allranks.perf.summary import summary
from allranks.record.rundir import RunDir
from allranks.report.as_data import as_json
from allranks.report.as_text import as_text
from allranks.report.making import make
from allranks.report.page import as_page
from support.histories import Doing, write_history

OWN = {
    "name": "loss/train", "call": "wandb.log", "line": "/home/ann/train.py:40 main", "value": 0.52, "own": 0.52, "step": 40,
    "how": "loss", "scale": 1.0,
}  # fmt: skip
SHARE = OWN | {
    "name": "val/acc",
    "how": "evaluation",
    "loop": "/home/ann/train.py:30 check",
    "share": 80,
    "length": 160,
}


def facts(*logged: dict[str, Any], logs: tuple[str, ...] = (), loss: float | None = 0.5) -> dict[str, Any]:
    """What one rank noted, as facts of the timeline."""
    noted = [{"kind": "logs", "name": name} for name in (*(one["name"] for one in logged), *logs)]
    noted += [{"kind": "logged", **one} for one in logged]
    if loss is not None:
        noted.append({"kind": "loss", "step": 9, "value": loss})
    return facts_of([{"kind": "replica"}, *noted])


def ranks(*each: dict[str, Any]) -> list[Doing]:
    return [Doing(facts=one) for one in each]


def titles(run_dir: Path, *each: dict[str, Any]) -> list[str]:
    return [remark.title for remark in find_remarks(read_history(write_history(run_dir, ranks(*each))))]


def test_own_loss_when_rank_0_alone_logs_it_then_name_line_and_share_are_said(tmp_path: Path) -> None:
    run = write_history(tmp_path, ranks(facts(OWN), facts(loss=0.61), facts(loss=0.55), facts(loss=0.5)))
    (remark,) = find_remarks(read_history(run))
    assert (remark.code, remark.ranks) == ("AR726", (0,))
    assert (
        remark.title == "likely: loss/train: logged by rank 0 alone, and rank 0's own: covers 1/4 of the data"
    )
    assert remark.facts == (
        "loss/train: wandb.log at train.py:40 main, 0.52 in step 40: the loss that backward was called on there",
        "in step 9 the loss was 0.5 on rank 0 and 0.61 on rank 1",
    )


def test_own_share_when_it_is_logged_then_the_loop_and_the_samples_are_said(tmp_path: Path) -> None:
    run = write_history(tmp_path, ranks(facts(SHARE, OWN | {"scale": 4.0, "how": "mean"}), facts(loss=0.6)))
    (remark,) = find_remarks(read_history(run))
    assert "val/acc, loss/train: logged by rank 0 alone" in remark.title
    assert (
        "after the evaluation at train.py:30 check, in which rank 0 has 80 of 160 samples" in remark.facts[0]
    )
    assert remark.facts[1].endswith("a mean of the losses that backward was called on there, times 4")


@pytest.mark.parametrize(
    "other",
    [facts(OWN, loss=0.61), facts(logs=("loss/train",), loss=0.61), facts(loss=0.50001), facts(loss=None)],
    ids=["both log their own", "both log it", "all compute the same", "no loss there"],
)
def test_numbers_when_they_may_be_of_all_ranks_then_nothing_is_said(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    assert titles(tmp_path, facts(OWN), other) == []


def test_names_with_the_ranks_number_then_each_rank_speaks_for_itself(tmp_path: Path) -> None:
    each = [facts(OWN | {"name": f"loss/rank{k}"}, loss=0.5 + k) for k in range(3)]
    assert titles(tmp_path, *each) == []


def test_numbers_when_nobody_noted_any_or_a_rank_is_missing_then_nothing_is_said(tmp_path: Path) -> None:
    assert titles(tmp_path / "a", facts(logs=("lr",)), facts(loss=0.61)) == []
    assert titles(tmp_path / "b", facts(OWN)) == []
    assert facts_of([{"kind": "replica"}]) == {}


def test_many_names_when_they_are_own_then_three_are_named(tmp_path: Path) -> None:
    own = [OWN | {"name": f"loss{k}"} for k in range(5)]
    (title,) = titles(tmp_path, facts(*own), facts(loss=0.6))
    assert "loss0, loss1, loss2 and 2 more: logged" in title


def test_remark_then_it_is_in_the_summary_also_of_a_short_run_and_in_every_report(tmp_path: Path) -> None:
    write_history(tmp_path, ranks(facts(OWN), facts(loss=0.61)), steps=10)
    lines = summary(read_history(tmp_path))
    assert [line.split()[0] for line in lines] == ["AR726", "why:", "do:"]
    report = make(RunDir(tmp_path), 0.0)
    text = as_text(report)
    assert "numbers to doubt" in text
    assert "AR726 likely: loss/train" in text
    found = json.loads(json.dumps(as_json(report)))["times"]["remarks"]
    assert [(r["code"], r["ranks"]) for r in found] == [("AR726", [0])]
    assert set(found[0]) == {"code", "name", "title", "fix", "ranks", "facts"}
    assert "AR726" in as_page(report)


def test_summary_when_there_is_no_remark_then_it_says_nothing_of_numbers(tmp_path: Path) -> None:
    write_history(tmp_path, ranks(facts(), facts()))
    assert not any("AR7" in line for line in summary(read_history(tmp_path)))
    report = make(RunDir(tmp_path), 0.0)
    assert "numbers to doubt" not in as_text(report)
    assert as_json(report)["times"]["remarks"] == []
