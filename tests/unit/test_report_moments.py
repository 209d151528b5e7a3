"""Is one step shown as it was: without gaps, with waiting apart from the exchange, and who came last?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.perf.history import read_history
from allranks.perf.values import CallTimes, StepTimes
from allranks.report import plots
from allranks.report.making import make
from allranks.report.moments import MOST_STEPS, calls_of, moments_of, segments, steps_to_show
from allranks.report.plots import thinned
from support.histories import Doing
from support.run_directories import BEGAN, make_run


def history(folder: Path, ranks: list[Doing], **options):
    return read_history(make_run(folder, ranks, **options).path)


def test_step_when_a_rank_is_late_then_the_others_wait_for_it(tmp_path: Path) -> None:
    (step,) = moments_of(history(tmp_path, [Doing(), Doing(data=14.0)], steps=40), [40])
    parts = [[(s.part, round((s.end - s.begin) * 1e3, 2)) for s in rank.segments] for rank in step.ranks]
    assert parts[0][-3:] == [("waiting", 13.0), ("exchange", 2.0), ("optimizer", 2.0)]
    assert parts[1][0] == ("data", 14.0) and "waiting" not in dict(parts[1])
    assert step.last == 1
    assert (
        step.sentence()
        == "Step 40: 35 ms. Rank 1 came last to the gradient exchange; rank 0 waited 13 ms for it."
    )


def test_step_when_all_come_at_once_then_nobody_is_named(tmp_path: Path) -> None:
    (step,) = moments_of(history(tmp_path, [Doing(), Doing()], steps=40), [40])
    assert "at about the same time" in step.sentence()


def test_step_when_there_is_one_rank_then_nobody_came_last(tmp_path: Path) -> None:
    (step,) = moments_of(history(tmp_path, [Doing()], steps=40), [40])
    assert step.last is None and step.sentence() == "Step 40: 22 ms."


def test_steps_to_show_when_many_are_known_then_are_few_with_the_slowest_and_the_wanted(
    tmp_path: Path,
) -> None:
    found = history(tmp_path, [Doing() for _ in range(3)], steps=400)
    shared = found.shared_steps()
    chosen = steps_to_show(found, pinned=[200])
    assert 200 in chosen and {shared[0], shared[-1]} <= set(chosen) <= set(shared)
    assert len(chosen) == MOST_STEPS and chosen == sorted(chosen)


moment = st.floats(0, 10, allow_nan=False)


@st.composite
def any_step(draw) -> StepTimes:
    def span():
        return draw(st.none() | st.tuples(moment, moment).map(lambda p: (min(p), max(p))))

    start, end = sorted((draw(moment), draw(moment)))
    return StepTimes(
        1, start, end, span(), span(), span(), span(), draw(st.none() | moment), draw(st.none() | moment)
    )


@settings(deadline=None, max_examples=60)
@given(any_step(), st.none() | moment, st.none() | moment)
def test_segments_of_any_moments_then_fill_the_step_without_overlap(step, last_ready, last_entry) -> None:
    found = segments(step, last_ready, last_entry)
    edges = [step.start, *(s.end for s in found)]
    assert [s.begin for s in found] == edges[:-1]
    assert edges[-1] == step.end
    assert sum(s.end - s.begin for s in found) == pytest.approx(step.end - step.start)


def test_plots_when_there_are_very_many_ranks_then_show_those_that_do_most(tmp_path: Path) -> None:
    ranks = [Doing() for _ in range(plots.MOST_RANKS + 6)]
    ranks[68] = Doing(python=9.0)
    report = make(make_run(tmp_path, ranks, steps=60), BEGAN)
    assert report.times is not None
    stack, steps, heat = plots.stack(report.times), plots.steps(report), plots.heat(report.times)
    assert stack and steps and heat
    assert len(stack["rows"]) == len(steps["rows"]) == len(steps["steps"][0]["ranks"]) == plots.MOST_RANKS
    assert "rank 68" in [row["name"] for row in stack["rows"]] and len(heat["rows"]) == len(ranks)


def test_calls_of_steps_then_belong_to_the_step_they_were_entered_in() -> None:
    calls = [CallTimes("all_reduce", "default", n, n, n + 0.5, n + 0.6) for n in range(6)]
    steps = [StepTimes(1, 1.0, 3.0), StepTimes(2, 4.0, 5.0)]
    assert [[c.seq for c in found] for found in calls_of(calls, steps)] == [[1, 2], [4]]


def test_thinned_when_a_curve_is_long_then_keeps_its_peaks_gaps_and_end() -> None:
    points = [(n, float(n % 7)) for n in range(10_000)]
    points[5000], points[6000] = (5000, 99.0), (6000, None)
    found = thinned(points)
    assert len(found) < 800
    assert {(5000, 99.0), (6000, None), points[-1]} <= set(found)
    assert [x for x, _ in found] == sorted({x for x, _ in found})
