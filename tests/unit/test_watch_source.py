"""Are the lines of the program found that explain an error or a call: the loop, its condition, what was frozen too late?"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.watch import source
from allranks.watch.causes import guarded
from allranks.watch.decide import decide
from allranks.watch.evidence import Call, Evidence, Failure, Rank, Record
from allranks.watch.observed import Loop
from allranks.watch.related import related_lines
from allranks.watch.verdict import Place

TRAIN = "/home/ann/train.py"
SOURCE = """if __name__:
    for kept in scores:
        if best < kept:
            broadcast(kept)
        done()
"""


@pytest.mark.parametrize(("first", "line", "found"), [(2, 4, 3), (2, 5, None), (0, 5, 1), (3, 4, None)])
def test_condition_then_the_innermost_below_the_loop(first: int, line: int, found: int | None) -> None:
    assert source.inner_condition(SOURCE, first, line) == found
    assert source.inner_condition("for x in", first, line) is None


def in_broadcast(rank: int, *, loops: tuple[Loop, ...]) -> Rank:
    call = Call("broadcast", seq=30, shape=(2,), dtype="float32", root=0, age_s=3.0, is_inside=True)
    record = Record(step=12, phase="collective", phase_s=3.0, median_step_s=0.01, group_seq=30, calls=(call,))
    record = replace(record, issued=2, is_probed=True)
    return Rank(rank, "gpu-a", pid=100 + rank, state="S", record=record, loops=loops)


def in_backward(rank: int, *, loops: tuple[Loop, ...]) -> Rank:
    record = Record(step=12, phase="backward", phase_s=3.0, median_step_s=0.01, group_seq=31, issued=1)
    return Rank(rank, "gpu-a", pid=100 + rank, state="S", wchan="futex", record=record, loops=loops)


def test_collective_when_made_in_a_loop_of_its_own_then_loop_condition_and_counts_are_told() -> None:
    condition = Place(TRAIN, 8, "remove", "if val_loss < kept:")
    own = Loop(Place(TRAIN, 7, "remove", "for kept in scores:"), last=9, line=9, condition=condition)
    training = Loop(Place(TRAIN, 20, "main", "for batch in batches:"), last=30, line=25)
    ranks = in_broadcast(0, loops=(own, training)), in_backward(1, loops=(training,))
    verdict = decide(Evidence(2, ranks, trigger="waiting", cwd="/home/ann"))
    assert verdict is not None and verdict.code == guarded.CODE
    text = "\n".join(verdict.facts)
    assert "train.py:7 in remove:  for kept in scores:" in text and "if val_loss < kept:" in text
    assert "rank 0: 2, rank 1: 1" in text


def test_collective_when_all_are_in_its_loop_then_the_loop_is_no_news() -> None:
    training = Loop(Place(TRAIN, 20, "main", "for batch in batches:"), last=30, line=25)
    ranks = in_broadcast(0, loops=(training,)), in_backward(1, loops=(training,))
    verdict = decide(Evidence(2, ranks, trigger="waiting"))
    assert verdict is not None and not any("loop" in fact for fact in verdict.facts)


@pytest.mark.parametrize(
    ("lines", "numbers"),
    [
        (["from torch.nn.parallel import DDP", "model = DDP(net)", "p.requires_grad_(False)", "q.requires_grad = False"], [3, 4, 2]),
        (["p.requires_grad_(False)", "model = DDP(net)", "p.requires_grad_(True)"], []),
        (["p.requires_grad_(False)", "run(net)"], []),
    ],
)  # fmt: skip
def test_parameters_without_gradient_when_frozen_below_the_wrapping_then_both_lines(
    lines: list[str], numbers: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text("\n".join(lines))
    message = "Expected to have finished reduction in the prior iteration before starting a new one."
    failure = Failure("RuntimeError", message, (Place(str(file), 2, "<module>"),))
    assert [p.line for p in related_lines(Rank(0, failure=failure))] == numbers


def grouped(rank: int, made: tuple[str, ...], *, first: int, waits: bool = True) -> Rank:
    """A rank that made these groups and stands in the barrier after them, or still computes; `first` = its oldest known call."""
    calls = [Call("new_group", number=first + k, members=m, seq=-1) for k, m in enumerate(made)]
    calls.append(Call("barrier", number=first + len(made), seq=30, age_s=3.0, is_inside=waits))
    record = Record(
        step=12,
        phase="collective" if waits else "python",
        phase_s=3.0,
        median_step_s=0.01,
        calls=tuple(calls),
    )
    return Rank(rank, "gpu-a", pid=100 + rank, state="S", record=record)


@pytest.mark.parametrize(("first", "waits", "code"), [(1, True, "AR257"), (40, True, ""), (1, False, "")])
def test_groups_when_calls_are_forgotten_or_a_rank_is_only_late_then_nothing_is_said(
    first: int, waits: bool, code: str
) -> None:
    ranks = grouped(0, ("0,1",), first=1), grouped(1, (), first=first, waits=waits)
    verdict = decide(Evidence(2, ranks, trigger="waiting"))
    assert (verdict is not None and verdict.code == "AR257") == bool(code)


def test_source_when_it_is_looked_at_again_then_it_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "for a in b:\n    if a:\n        c(a)  # of this test alone\n"
    parsed: list[str] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda source: parsed.append(source) or parse(source))
    for _ in range(2):
        assert (source.condition(text, 3), source.outer_loop(text, 3)) == (2, (1, 3))
        assert (source.rank_guard(text, 3), source.is_cleanup(text, 3)) == (None, False)
    assert parsed == [text]


def test_source_when_it_is_nested_too_deeply_then_nothing_is_said_of_it() -> None:
    text = f"if {'-' * 200_000}1:\n    pass\n"
    assert (source.condition(text, 2), source.outer_loop(text, 2), source.is_cleanup(text, 2)) == (
        None,
        None,
        False,
    )
