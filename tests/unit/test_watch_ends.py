"""Is a rank that ended, or left its loop, told with what it said and where it left?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from allranks.watch.causes.raised import advice
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Exit, Failure, Loader, Rank, Record
from allranks.watch.related import related_lines
from allranks.watch.verdict import Place, Verdict

LINE = Place("/home/ann/train.py", 18, "main", "for x, y in loader:")


def in_backward(record: Record) -> Rank:
    return Rank(0, "gpu-a", pid=100, state="S", wchan="futex_do_wait", record=record)


def said(*ranks: Rank) -> Verdict:
    verdict = decide(Evidence(2, ranks, trigger="exit", cwd="/home/ann"))
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("kind", "message", "word"),
    [
        ("KeyError", "'module.0.weight'", "'module.'"),
        ("KeyError", "'lr'", ""),
        ("TypeError", "Net does not implement the interface of a model", ""),
        ("RuntimeError", "Unable to find address for: eth9", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_advice_when_an_exception_is_like_a_known_one_only_by_its_name_then_none(
    kind: str, message: str, word: str
) -> None:
    found = advice(Failure(kind, message))
    assert (word in found) if word else not found


def test_exit_when_it_had_a_reason_to_give_then_that_is_told() -> None:
    waits = in_backward(Record(step=30, phase="backward", phase_s=0.3, median_step_s=0.01, group_seq=60))
    words = Record(step=30, phase="exit", exit_kind="system_exit", exit_code=1, exit_where=LINE)
    left = Rank(1, "gpu-a", pid=101, exit=Exit(1, None, 5.0), record=words, output=("no more data", ""))
    verdict = said(waits, left)
    assert verdict.code == "AR205"
    assert "the last that it printed: no more data" in verdict.facts
    silent = said(waits, replace(left, exit=Exit(0, None, 5.0), record=replace(words, exit_code=0)))
    assert not any("printed" in fact for fact in silent.facts)


def test_loop_when_it_was_left_in_the_pass_before_then_that_pass_is_told_and_no_skipped_step() -> None:
    whole = Loader(2, 60, 60, LINE, is_exhausted=True)
    known = Record(step=141, phase="exit", exit_kind="ended", is_probed=True)
    first = replace(known, phase="backward", phase_s=0.3, median_step_s=0.01, exit_kind="", group_seq=282)
    first = replace(first, loader=Loader(3, 22, 60, LINE), loader_before=whole)
    second = replace(known, loader=replace(whole, number=3), loader_before=Loader(2, 21, 60, LINE))
    ended = Rank(1, "gpu-a", pid=101, exit=Exit(0, None, 5.0), record=second)
    verdict = said(in_backward(first), ended)
    assert (verdict.code, verdict.ranks) == ("AR265", (1,))
    assert "left its loop in the middle of a pass" in verdict.what
    assert any("drew 21 of 60 batches of its pass 2, rank 0 60" in fact for fact in verdict.facts)
    alike = replace(first, loader_before=Loader(2, 21, 60, LINE))
    assert "in the middle of a pass" not in said(in_backward(alike), ended).what


def test_breakpoint_when_the_debugger_quits_at_a_later_line_then_its_own_line_is_told_first(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("for x in xs:\n    go(x)\n    # breakpoint()\n    breakpoint()\n")
    failure = Failure("BdbQuit", "", (Place(str(script), 1, "<module>", "for x in xs:"),))
    rank = Rank(1, "gpu-a", pid=101, exit=Exit(1, None, 5.0), record=Record(step=30), failure=failure)
    rank = replace(rank, related=related_lines(rank))
    assert [p.line for p in rank.related] == [4]
    verdict = said(in_backward(Record(step=30, phase="backward", phase_s=0.3)), rank)
    assert verdict.code == "AR220"
    assert "train.py:4:  breakpoint()" in verdict.where[0] and "for x in xs" in verdict.where[1]
