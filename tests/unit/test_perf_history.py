"""Is a run's history read as it was written, and do the parts of its steps add up?"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from allranks.perf import lines
from allranks.perf.breakdown import PARTS, Waits, breakdown, over_time
from allranks.perf.history import NoHistory, read_history
from allranks.perf.summary import summary
from allranks.record import layout as at
from allranks.record import page
from allranks.record.writer import Writer
from support.histories import Doing, write_history


def test_history_of_nodes_whose_clocks_differ_then_steps_end_together(tmp_path: Path) -> None:
    found = read_history(write_history(tmp_path, [Doing(), Doing(data=12)], nodes=2, clock_ahead_s=3.0))
    assert [node.shift_s for node in found.nodes] == pytest.approx([0.0, -3.0])
    ends = [{s.step: s.end for s in rank.steps} for rank in found.ranks]
    assert all(ends[0][n] == pytest.approx(ends[1][n], abs=1e-5) for n in found.shared_steps())


def test_history_cut_short_by_a_kill_then_the_rest_is_read(tmp_path: Path) -> None:
    run = write_history(tmp_path, [Doing(), Doing()])
    file = run / "timeline" / "node0.jsonl"
    whole = read_history(run)
    file.write_text(file.read_text()[:-40])
    assert len(read_history(run).ranks[0].samples) == len(whole.ranks[0].samples)


def test_history_of_two_attempts_then_the_last_is_read_unless_asked(tmp_path: Path) -> None:
    run = write_history(tmp_path, [Doing(), Doing()], steps=100)
    file = run / "timeline" / "node0.jsonl"
    first = file.read_text()
    again = first.replace('"attempt": 0', '"attempt": 1').replace('"pid": 1000', '"pid": 7')
    file.write_text(first + again)
    assert (read_history(run).attempt, read_history(run).attempts) == (1, 2)
    assert read_history(run).ranks[0].pid == 7
    assert read_history(run, 0).ranks[0].pid == 1000
    with pytest.raises(NoHistory):
        read_history(run, 5)


def test_history_of_a_long_run_then_some_looks_are_read_and_sums_are_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_history(tmp_path, [Doing(), Doing(data=9)], steps=3000)
    file = run / "timeline" / "node0.jsonl"
    file.write_text("".join(_look_by_look(file.read_text().splitlines())))
    whole = read_history(run)
    monkeypatch.setattr(lines, "MOST_LOOKS", 20)
    some = read_history(run, wanted=[1064])
    for rank, of_all in zip(some.ranks, whole.ranks, strict=True):
        assert 15 <= len(rank.samples) <= 25 < len(of_all.samples)
        assert (rank.samples[0], rank.samples[-1]) == (of_all.samples[0], of_all.samples[-1])
        assert set(rank.steps) < set(of_all.steps)
    shared = some.shared_steps()
    assert len(shared) > 20 and 1064 in shared and max(shared) == 3000
    for one, other in zip(breakdown(some).ranks, breakdown(whole).ranks, strict=True):
        assert one.parts == pytest.approx(other.parts, rel=0.02, abs=1e-6)


def _look_by_look(texts: list[str]) -> list[str]:
    """As an agent writes: steps beside the sample of their second, not all at the end."""
    out, steps = [], []
    for line in map(json.loads, texts):
        if line["kind"] == "steps":
            steps += [(row[12] / 1e6, {**line, "rows": [row]}) for row in line["rows"]]
    steps.sort(key=lambda pair: pair[0])
    for line in map(json.loads, texts):
        if line["kind"] == "steps":
            continue
        out.append(json.dumps(line) + "\n")
        if line["kind"] == "sample":
            out += [json.dumps(step) + "\n" for end, step in steps if line["t"] - 1 < end <= line["t"]]
    last = [json.dumps(step) + "\n" for _, step in steps[-32:]]
    return out + last


def test_timeline_of_another_attempt_then_it_is_not_even_read(tmp_path: Path) -> None:
    run = write_history(tmp_path, [Doing()], steps=100)
    file = run / "timeline" / "node0.jsonl"
    first = file.read_text()
    file.write_text(first.replace("400", "x") + first.replace('"attempt": 0', '"attempt": 1'))
    assert read_history(run).attempt == 1
    assert len(list(lines.lines_of(lines.stretches(file)[1]))) == len(first.splitlines()) - 1


def test_run_without_timeline_then_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(NoHistory):
        read_history(tmp_path)


def test_parts_then_they_add_up_to_the_step_and_are_those_that_were(tmp_path: Path) -> None:
    found = breakdown(read_history(write_history(tmp_path, [Doing(copy=1.0, log=0.5), Doing(data=9)])))
    for rank in found.ranks:
        assert set(rank.parts) == set(PARTS)
        assert sum(rank.parts.values()) / rank.steps == pytest.approx(rank.step_s, rel=0.01)
    first, second = found.ranks
    assert first.per_step("waiting") == pytest.approx(0.0065, rel=0.05)
    assert second.per_step("waiting") == pytest.approx(0.0, abs=1e-5)
    assert first.per_step("exchange") == pytest.approx(0.002, rel=0.05)
    assert second.per_step("data") == pytest.approx(0.009, rel=0.05)
    assert first.per_step("copy") == pytest.approx(0.001, rel=0.05)


def test_time_after_the_last_step_then_it_belongs_to_no_step(tmp_path: Path) -> None:
    run = write_history(tmp_path, [Doing()], steps=200)
    file = run / "timeline" / "node0.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = next(line for line in reversed(lines) if line["kind"] == "sample")
    saved = json.loads(json.dumps(last))
    saved["t"] += 60
    saved["rows"][0][4 + 4] += 60  # python
    before = breakdown(read_history(run))
    file.write_text(file.read_text() + json.dumps(saved) + "\n")
    assert breakdown(read_history(run)) == before


def test_over_time_then_pieces_cover_the_run_without_gaps(tmp_path: Path) -> None:
    history = read_history(write_history(tmp_path, [Doing(), Doing()], steps=1000))
    rows = over_time(history, Waits(history), pieces=10)
    for pieces in rows.values():
        assert 8 <= len(pieces) <= 11
        assert all(a.until == b.since for a, b in pairwise(pieces))
        assert sum(p.steps for p in pieces) > 950


def test_summary_then_it_names_the_step_its_parts_and_the_straggler(tmp_path: Path) -> None:
    lines = summary(read_history(write_history(tmp_path, [Doing(), Doing(data=15)])))
    assert lines[0].startswith("370 steps of 36.0 ms (median)") or "steps of 36.0 ms (median)" in lines[0]
    assert lines[1].startswith("rank 1: data wait 42%")
    assert any(line.startswith(("AR800 rank 1", "AR801 rank 1")) for line in lines)


def test_summary_of_a_short_run_then_nothing_is_said(tmp_path: Path) -> None:
    assert summary(read_history(write_history(tmp_path, [Doing(), Doing()], steps=10))) == []


# --- what the record keeps of steps ---


def timed_page(folder: Path) -> tuple[Writer, page.PageReader]:
    writer = Writer()
    writer.open(str(folder))
    assert writer.path is not None
    return writer, page.PageReader(writer.path)


def test_quick_steps_then_only_some_are_timed_and_all_ranks_choose_the_same() -> None:
    slow = [k for k in range(1, 3000) if at.preference(k) >= 2]
    quick = [k for k in range(1, 3000) if at.preference(k) >= 5]
    assert set(quick) < set(slow)
    step, seen = 0, []
    while (step := at.next_timed(step, 4_000_000)) < 3000:
        seen.append(step)
    assert seen == quick
    assert at.next_timed(7, 200_000_000) == 8
    for period in (2, 4, 8):  # loader workers take turns: none of their turns may be left out
        counts = [sum(k % period == turn for k in quick) for turn in range(period)]
        assert min(counts) > 0.5 * len(quick) / period


@pytest.mark.parametrize("least", range(at.MAX_PREFERENCE + 1))
def test_next_preferred_when_asked_after_any_step_then_none_is_passed_over(least: int) -> None:
    preferred = [k for k in range(1, 12_000) if at.preference(k) >= least]
    for before, after in zip([0, *preferred], preferred, strict=False):
        for step in {before, (before + after) // 2, after - 1}:
            assert at.next_preferred(step, least) == after


@pytest.mark.parametrize(
    ("ms", "least"),
    [(0.001, 7), (1.0, 7), (1.5, 7), (1.6, 6), (3.2, 5), (49, 2), (50, 1), (100, 0), (900, 0)],
)
def test_next_timed_when_steps_take_so_long_then_so_few_are(ms: float, least: int) -> None:
    assert at.next_timed(40, int(ms * 1e6)) == at.next_preferred(40, least)


def test_timed_step_then_moments_of_older_steps_are_left_out(tmp_path: Path) -> None:
    writer, reader = timed_page(tmp_path)
    writer.mark(at.DATA)
    writer.times[at.M_DATA_FROM] = writer.times[at.M_DATA_TO] = writer.words[at.W_SINCE_NS]
    writer.end_step()
    writer.next_timed = 2
    writer.end_step()
    first, second = reader.read().timed
    assert first.data_from_ns > 0
    assert (second.step, second.data_from_ns) == (2, 0)
    assert second.start_ns == first.end_ns
    reader.close()


def test_times_then_the_phase_that_goes_on_counts_until_now(tmp_path: Path) -> None:
    writer, reader = timed_page(tmp_path)
    writer.flush()
    before = reader.read().times
    writer.mark(at.FORWARD)
    writer.flush()
    after = reader.read().times
    assert before is not None and after is not None
    spent = sum(after.phase_ns.values()) - sum(before.phase_ns.values())
    assert spent == after.at_ns - before.at_ns
    assert after.phase_ns[page.Phase.FORWARD] > 0
    reader.close()


def test_evaluation_then_all_that_is_called_in_it_counts_as_evaluation(tmp_path: Path) -> None:
    writer, reader = timed_page(tmp_path)
    writer.phase(at.EVALUATE)
    for phase in (at.DATA, at.FORWARD):
        writer.mark(phase)
    writer.mark(at.EVALUATE)
    writer.flush()
    inside = reader.read().times
    writer.leave()
    writer.flush()
    after = reader.read().times
    assert inside is not None and after is not None
    for times in (inside, after):
        assert times.phase_ns[page.Phase.DATA] == times.phase_ns[page.Phase.FORWARD] == 0
    assert after.phase_ns[page.Phase.EVALUATE] >= inside.phase_ns[page.Phase.EVALUATE] > 0
    reader.close()
