"""Are the lines of a slow rank there when it is told of, of the phase it is slow in, and is it asked only as long as it looks slow?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.core.job import Job, NodeInfo, RankProcess
from allranks.record import layout as at
from allranks.record import process, sampled, ticking
from allranks.record.lines import Lines
from allranks.record.writer import Writer
from allranks.watch import sampling
from allranks.watch.evidence import Evidence, Rank, Slow, from_json, to_json
from allranks.watch.rows import Row
from allranks.watch.slowness import WINDOW_S, Slowness
from allranks.watch.trigger import Suspicion
from allranks.watch.verdict import Place
from allranks.watch.watcher import Watcher

SLOW = Slow(1, 0.2, 0.1, 0.1, 0.3, "data", 4.0)
LINE = "/home/ann/train.py"


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    found = Writer()
    found.open(str(tmp_path))
    monkeypatch.setattr(process, "WRITER", found)
    monkeypatch.setattr(process, "LINES", Lines(found))
    yield found
    found.close()


def own_lines(folder: Path) -> list[sampling.SeenAt]:
    return sampling.seen_at(Rank(1, "gpu-0", pid=os.getpid()), folder)


def test_lines_when_asked_for_then_they_are_there_by_phase_and_the_rank_goes_on_noting(
    writer: Writer, tmp_path: Path
) -> None:
    assert own_lines(tmp_path) == []
    until = writer.words[at.W_SAMPLE_UNTIL_NS]
    for phase in (at.DATA, at.FORWARD, at.DATA):
        writer.mark(phase)
        ticking._sample()
    (data, place, times), (forward, _, once) = own_lines(tmp_path)
    assert (data, times, forward, once) == ("data", 2, "forward", 1)
    assert (place.file, place.code) == (__file__, "ticking._sample()")
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


def test_lines_when_the_room_for_names_is_nearly_full_then_none_is_added(writer: Writer) -> None:
    assert writer.path is not None
    sampled.ask(writer.path, 60.0)
    number = 0
    while writer.has_room:
        number += 1
        writer.string(f"/home/ann/train.py:{number} main")
    ticking._sample()
    assert sampled.read(writer.path) == []
    assert writer.name_of(writer.string("/home/ann/train.py:1 main"))


def test_lines_when_the_marks_are_light_then_the_phase_is_that_of_the_stack(writer: Writer) -> None:
    assert writer.path is not None
    writer.mark(at.PYTHON)
    writer.light.is_on = True
    writer.words[at.W_PHASE] = at.OPTIMIZER  # of an earlier step
    sampled.ask(writer.path, 60.0)
    ticking._sample()
    assert [phase.name for phase, _ in sampled.read(writer.path)] == ["PYTHON"]


def test_lines_when_the_rank_has_no_page_then_none(tmp_path: Path) -> None:
    assert own_lines(tmp_path) == []
    path = tmp_path / f"{os.getpid()}.page"
    path.write_bytes(b"of another version")
    assert own_lines(tmp_path) == [] and path.read_bytes() == b"of another version"
    assert sampling.seen_at(None, tmp_path) == []


def seen(*rows: tuple[str, int, int]) -> list[sampling.SeenAt]:
    return [(phase, Place(LINE, line, "main"), times) for phase, line, times in rows]


@pytest.mark.parametrize(("phase", "lines"), [("data", [7, 9]), ("evaluate", [11]), ("optimizer", [])])
def test_slow_rank_when_lines_were_seen_then_those_of_its_phase_seen_most_are_named(
    phase: str, lines: list[int]
) -> None:
    found = sampling.Lines()
    found.found(
        1, seen(("data", 7, 5), ("data", 8, 1), ("data", 9, 2), ("forward", 11, 9), ("python", 12, 9))
    )
    assert [p.line for p in found.with_places(replace(SLOW, phase=phase)).places] == lines


def test_slow_rank_when_few_lines_were_seen_then_it_is_named_later_but_it_is() -> None:
    lines = sampling.Lines()
    assert lines.is_due(1, 10.0)
    lines.found(1, seen(("data", 7, sampling.ENOUGH - 1), ("python", 8, 20)))
    assert not lines.is_enough(SLOW, 11.0)
    assert lines.is_enough(SLOW, 10.0 + sampling.FOR_S)
    assert not lines.is_enough(
        SLOW, 10.5 + sampling.FOR_S
    )  # the evidence spoke against it: not again at once
    assert lines.is_enough(SLOW, 10.0 + sampling.FOR_S + WINDOW_S)
    lines.found(1, seen(("data", 7, sampling.ENOUGH)))
    assert lines.is_enough(SLOW, 30.0)


def test_slow_rank_when_another_was_suspected_in_between_then_its_old_lines_do_not_count() -> None:
    lines = sampling.Lines()
    assert lines.is_due(1, 10.0) and not lines.is_due(1, 10.1)
    lines.found(1, seen(("data", 7, 9)))
    assert lines.is_due(0, 10.2)
    assert lines.is_due(1, 10.3)
    assert not lines.is_enough(SLOW, 11.0)


class Talk:
    """Keeps what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], Sequence[int] | None]] = []

    def ask(self, request: dict[str, Any], node_ranks: Sequence[int] | None = None) -> None:
        self.asked.append((request, node_ranks))

    def event(self, event: dict[str, Any]) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Watcher, Talk]]:
    """The watcher of the node of rank 0, which is this process; rank 1, of another node, looks slow."""
    nodes = {n: NodeInfo(n, f"gpu-{n}", (n,)) for n in range(2)}
    rank = RankProcess(0, 0, os.getpid(), 0.0, tmp_path / "rank0.log")
    watcher, talk = Watcher(), Talk()
    watcher.start(Job("j", tmp_path, tmp_path, "gpu-0", 0, True, 2, 0, (rank,), tuple(nodes.values())), talk)
    watcher._nodes = nodes
    watcher._slowness._suspect = 1
    yield watcher, talk
    watcher.close()


ROWS = {0: Row(0, "R"), 1: Row(1, "R")}


def test_watcher_when_a_rank_of_another_node_looks_slow_then_that_node_is_asked_now_and_then(
    hub: tuple[Watcher, Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, talk = hub
    monkeypatch.setattr(watcher._slowness, "look", lambda *_: None)
    for now in (10.0, 10.1, 10.2, 11.0):
        watcher._look_for_slow(ROWS, now)
    assert talk.asked == [({"sample": 1}, [1])] * 2
    watcher._slowness._suspect = None  # it no longer does
    watcher._look_for_slow(ROWS, 12.0)
    assert len(talk.asked) == 2


def test_watcher_when_the_other_node_has_answered_then_the_rank_is_named_with_its_line(
    hub: tuple[Watcher, Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, _ = hub
    monkeypatch.setattr(watcher._slowness, "look", lambda *_: SLOW)
    concluded: list[Evidence] = []
    monkeypatch.setattr(watcher, "_conclude", lambda evidence: concluded.append(evidence) or ())
    watcher._look_for_slow(ROWS, 10.0)
    assert not concluded
    answer = {"seen_at": [("data", to_json(Place(LINE, 7, "main")), 5)], "of": 1}
    watcher.on_bundle(1, json.loads(json.dumps(answer)))
    watcher._look_for_slow(ROWS, 10.3)
    ((slow,),) = ([e.slow] for e in concluded)
    assert slow is not None and [p.line for p in slow.places] == [7]


def test_watcher_when_asked_for_a_rank_of_its_own_then_its_lines_are_answered(
    hub: tuple[Watcher, Talk], writer: Writer
) -> None:
    watcher, _ = hub
    assert watcher.capture({"sample": 0}) == {"seen_at": [], "of": 0}
    writer.mark(at.DATA)
    ticking._sample()
    ((phase, place, times),) = watcher.capture({"sample": 0})["seen_at"]
    assert (phase, from_json(Place, place).file, times) == ("data", __file__, 1)


def test_watcher_when_only_notes_are_new_then_it_looks_for_slow_ranks_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, looked = Watcher(), []
    watcher.start(Job("j", tmp_path, tmp_path, "gpu-0", 0, True, 1, 0, (), ()), Talk())
    monkeypatch.setattr(watcher, "_look_for_slow", lambda *_: looked.append(True) or ())
    for kind in ("notes", "waiting"):
        monkeypatch.setattr(watcher._trigger, "look", lambda *_, kind=kind: Suspicion(kind, (0,)))
        watcher.tick({})
    assert len(looked) == 1
    watcher.close()


def test_slowness_when_a_rank_is_over_then_nobody_is_suspected() -> None:
    slowness = Slowness()
    slowness._suspect = 1
    slowness.look({0: Row(0, "", is_over=True, step=9), 1: Row(1, "R", step=9)}, 5.0)
    assert slowness.suspect() is None
