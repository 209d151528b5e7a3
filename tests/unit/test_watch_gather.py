"""Is the evidence of all ranks of one moment, and each stack as old as its record?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.record.page import Phase
from allranks.record.writer import Writer
from allranks.watch import gather, proc
from allranks.watch.asking import Asker, Stacks, Target
from allranks.watch.evidence import Rank, Stack
from allranks.watch.stacks import main_stack
from allranks.watch.verdict import Place

PID = 4_190_000  # above the kernel's pid_max, plus k: nobody's


@pytest.fixture
def writers(tmp_path: Path) -> list[Writer]:
    made = []
    for number in range(2):
        writer = Writer()
        writer.open(str(tmp_path))
        assert writer.path is not None
        Path(writer.path).rename(tmp_path / f"{PID + number}.page")
        made.append(writer)
    return made


def _when_read(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act(k)` before the k-th reading of a page."""
    count, read = iter(range(1000)), gather.page_of

    def reading(folder: Path | None, pid: int) -> object:
        act(next(count))
        return read(folder, pid)

    monkeypatch.setattr(gather, "page_of", reading)


def test_pages_when_ranks_go_on_between_two_readings_then_read_until_they_agree(
    writers: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(reading: int) -> None:
        if reading == 1:  # between rank 0's page and rank 1's
            writers[0].mark(Phase.FORWARD)
            writers[1].mark(Phase.COLLECTIVE)

    _when_read(monkeypatch, act)
    found = gather.pages_at_one_moment(tmp_path, [PID, PID + 1])
    assert [found[PID + k].phase for k in range(2)] == [Phase.FORWARD, Phase.COLLECTIVE]


def test_pages_when_a_rank_never_stands_still_then_read_a_few_times_only(
    writers: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[int] = []

    def act(reading: int) -> None:
        readings.append(reading)
        writers[0].mark(Phase.FORWARD)

    _when_read(monkeypatch, act)
    assert set(gather.pages_at_one_moment(tmp_path, [PID, PID + 1])) == {PID, PID + 1}
    assert len(readings) == 2 * gather.SNAPSHOT_TRIES


@pytest.mark.parametrize("goes_on_again", [False, True])
def test_stack_when_the_rank_has_gone_on_since_then_taken_again_or_left_out(
    goes_on_again: bool, writers: list[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[int]] = []

    def stacks(asker: Asker, targets: list[Target], *, is_extra: bool = False) -> Stacks:
        asked.append({t.pid for t in targets})
        line = len(asked)
        if line == 1 or goes_on_again:
            writers[0].mark(Phase.COLLECTIVE)
        place = Place("/home/ann/train.py", line, "main")
        return {t.pid: ("signal", (Stack((place,), "0x1", is_main=True),)) for t in targets}

    monkeypatch.setattr(Asker, "stacks", stacks)
    monkeypatch.setattr(proc, "state", lambda pid: "T")  # stopped after its last step
    ranks = [Rank(rank=k, host="h", node_rank=0, pid=PID + k) for k in range(2)]
    moved, still = gather.take(ranks, tmp_path, sample_s=0.0)
    assert asked == [{PID, PID + 1}, {PID}]
    assert main_stack(still.stacks).frames[0].line == 1  # type: ignore[union-attr]
    assert (moved.state, still.state) == ("R" if goes_on_again else "T", "T")
    if goes_on_again:
        assert moved.stacks == ()
    else:
        assert main_stack(moved.stacks).frames[0].line == 2  # type: ignore[union-attr]
