"""Are the lines of a slow rank there when it is told of, of the phase it is slow in, and is it asked only as long as it looks slow?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from allranks.core.job import Job, NodeInfo, RankProcess
from allranks.record import layout as at
from allranks.record import process, sampled, ticking
from allranks.record.lines import Lines
from allranks.record.writer import Writer
from allranks.watch import sampling
from allranks.watch.evidence import Rank, Slow
from allranks.watch.rows import Row
from allranks.watch.verdict import Place
from allranks.watch.watcher import Watcher

SLOW = (1, "data")


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    found = Writer()
    found.open(str(tmp_path))
    monkeypatch.setattr(process, "WRITER", found)
    monkeypatch.setattr(process, "LINES", Lines(found))
    yield found
    found.close()


def own_places(folder: Path, phase: str) -> list[Place]:
    return sampling.places(Rank(1, "gpu-0", pid=os.getpid()), folder, phase)


def test_lines_when_asked_for_then_those_of_the_phase_are_there_and_the_rank_goes_on_noting(
    writer: Writer, tmp_path: Path
) -> None:
    assert own_places(tmp_path, "data") == []
    until = writer.words[at.W_SAMPLE_UNTIL_NS]
    for phase in (at.DATA, at.FORWARD, at.DATA):
        writer.mark(phase)
        ticking._sample()
    (one, other) = own_places(tmp_path, "data")
    assert one == other
    assert (one.file, one.function) == (
        __file__,
        test_lines_when_asked_for_then_those_of_the_phase_are_there_and_the_rank_goes_on_noting.__name__,
    )
    assert one.code == "ticking._sample()"
    assert len(own_places(tmp_path, "")) == 3
    assert writer.words[at.W_SAMPLE_UNTIL_NS] > until


def test_lines_when_nobody_asks_any_more_then_none_is_noted_and_the_old_ones_are_gone(writer: Writer) -> None:
    assert writer.path is not None
    sampled.ask(writer.path, 60.0)
    ticking._sample()
    assert len(sampled.read(writer.path)) == 1
    sampled.ask(writer.path, -1.0)
    ticking._sample()
    assert sampled.read(writer.path) == [] and not writer.words[at.W_SAMPLE_UNTIL_NS]


def test_lines_when_there_are_more_than_fit_then_the_newest(writer: Writer) -> None:
    assert writer.path is not None
    sampled.ask(writer.path, 60.0)
    writer.mark(at.DATA)
    ticking._sample()
    writer.mark(at.PYTHON)
    for _ in range(at.NUM_SAMPLED):
        ticking._sample()
    assert [phase.name for phase, _ in sampled.read(writer.path)] == ["PYTHON"] * at.NUM_SAMPLED


def test_lines_when_the_marks_are_light_then_the_phase_is_that_of_the_stack(writer: Writer) -> None:
    assert writer.path is not None
    writer.mark(at.PYTHON)
    writer.light.is_on = True
    writer.words[at.W_PHASE] = at.OPTIMIZER  # of an earlier step
    sampled.ask(writer.path, 60.0)
    ticking._sample()
    assert [phase.name for phase, _ in sampled.read(writer.path)] == ["PYTHON"]


def test_lines_when_the_rank_has_no_page_then_none(tmp_path: Path) -> None:
    assert own_places(tmp_path, "data") == []
    (tmp_path / f"{os.getpid()}.page").write_bytes(b"of another version")
    assert own_places(tmp_path, "data") == []
    assert sampling.places(None, tmp_path, "data") == []


def test_slow_rank_when_lines_were_seen_then_the_one_seen_most_and_one_seen_nearly_as_often_are_named() -> (
    None
):
    seen = [
        Place("/home/ann/train.py", n, "main") for n, times in ((7, 5), (8, 1), (9, 2)) for _ in range(times)
    ]
    slow = Slow(1, 0.2, 0.1, 0.1, 0.3, "data", 4.0)
    assert [p.line for p in sampling.with_places(slow, seen).places] == [7, 9]
    assert sampling.with_places(slow, []).places == ()


class Talk:
    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], Sequence[int] | None]] = []

    def ask(self, request: dict[str, Any], node_ranks: Sequence[int] | None = None) -> None:
        self.asked.append((request, node_ranks))


def test_watcher_when_a_rank_of_another_node_looks_slow_then_that_node_is_asked_now_and_then_and_its_lines_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {n: NodeInfo(n, f"gpu-{n}", (n,)) for n in range(2)}
    rank = RankProcess(0, 0, os.getpid(), 0.0, tmp_path / "rank0.log")
    watcher, talk = Watcher(), Talk()
    watcher.start(Job("j", tmp_path, tmp_path, "gpu-0", 0, True, 2, 0, (rank,), tuple(nodes.values())), talk)
    monkeypatch.setattr(watcher._slowness, "look", lambda *_: None)
    watcher._slowness._suspect, watcher._slowness._phase = SLOW
    rows = {0: Row(0, "R"), 1: Row(1, "R")}
    watcher._nodes = nodes
    for now in (10.0, 10.1, 10.2, 11.0):
        watcher._look_for_slow(rows, now)
    assert talk.asked == [({"sample": 1, "phase": "data"}, [1])] * 2
    watcher.on_bundle(
        1, {"places": [{"file": "/home/ann/train.py", "line": 7, "function": "main"}], "of": SLOW}
    )
    assert [p.line for p in watcher._seen_at[SLOW]] == [7]
    watcher._slowness._suspect = None  # it no longer does
    watcher._look_for_slow(rows, 12.0)
    assert len(talk.asked) == 2
    watcher.close()
