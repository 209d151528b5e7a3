"""Does the agent write what pages say, so that it is read back, also after a restart and when a rank has ended?"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from allranks.core.job import Job, RankProcess
from allranks.perf.history import read_history
from allranks.record import layout as at
from allranks.record import page
from allranks.record.writer import Writer
from allranks.watch import timeline
from allranks.watch.evidence import Rank
from allranks.watch.passes_seen import PassesSeen
from allranks.watch.timeline import Timeline, _of_pass
from allranks.watch.workers import Workers


def job_of(tmp_path: Path, restart: int = 0) -> Job:
    records = tmp_path / "records"
    records.mkdir(exist_ok=True)
    log = tmp_path / "rank0.log"
    log.write_text("printed")
    rank = RankProcess(0, 0, os.getpid(), 0.0, log)
    return Job("id", tmp_path / "run", records, "here", 0, True, 1, restart, (rank,), ())


def page_of(job: Job) -> Writer:
    writer = Writer()
    writer.open(str(job.record_dir))
    return writer


def a_step(writer: Writer) -> None:
    writer.mark(at.BACKWARD)
    writer.times[at.M_BACKWARD_FROM] = writer.words[at.W_SINCE_NS]
    writer.mark(at.PYTHON)
    writer.times[at.M_BACKWARD_TO] = writer.words[at.W_SINCE_NS]
    writer.next_timed = writer.step + 1
    writer.end_step()
    writer.flush()


def test_rank_then_its_samples_steps_and_facts_are_read_back(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    writer, timeline = page_of(job), Timeline(job)
    for _ in range(3):
        a_step(writer)
    timeline.look([Rank(0, "here", pid=os.getpid())])
    a_step(writer)
    timeline.ended(0)
    timeline.close()
    found = read_history(job.run_dir)
    rank = found.ranks[0]
    assert [s.step for s in rank.samples] == [3, 4]
    assert [s.step for s in rank.steps] == [1, 2, 3, 4]
    assert all(
        s.backward is not None and s.start <= s.backward[0] <= s.backward[1] <= s.end for s in rank.steps[1:]
    )
    first, last = rank.samples
    spent = sum(last.phases.values()) - sum(first.phases.values())
    assert abs(spent - (last.t - first.t)) < 2e-3  # each is rounded to a tenth of a millisecond
    assert (last.printed, rank.facts["affinity"]) == (7, len(os.sched_getaffinity(0)))
    assert last.cpu_s > 0


@pytest.mark.parametrize(("first_s", "every_s"), [(0.0, 0.5), (60.0, 1.0)])
def test_looks_when_one_comes_a_moment_early_then_it_is_a_sample_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_s: float, every_s: float
) -> None:
    timeline, taken = Timeline(job_of(tmp_path)), []
    monkeypatch.setattr(timeline, "_sample", lambda *_: taken.append(timeline._age()))
    looks = [first_s + k * every_s + 0.004 * (k % 2 == 0) for k in range(8)]
    for age in looks:
        for at_s in (age, age + every_s - 0.1):  # a tick before the next is too early
            monkeypatch.setattr(timeline, "_age", lambda at_s=at_s: at_s)
            timeline.look([])
    assert taken == looks
    timeline.close()


def test_restarts_then_each_is_an_attempt_of_its_own(tmp_path: Path) -> None:
    for restart in range(2):
        job = job_of(tmp_path, restart)
        writer, timeline = page_of(job), Timeline(job)
        a_step(writer)
        timeline.look([Rank(0, "here", pid=os.getpid())])
        timeline.close()
    assert (read_history(job.run_dir).attempt, read_history(job.run_dir).attempts) == (1, 2)


def test_run_directory_that_cannot_be_written_then_nothing_happens(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    (tmp_path / "run").write_text("a file in its place")
    timeline = Timeline(job)
    timeline.look([Rank(0, "here", pid=os.getpid())])
    timeline.ended(0)
    timeline.close()


def test_worker_that_ended_then_what_it_read_still_counts(tmp_path: Path) -> None:
    writer = Writer()
    writer.open(str(tmp_path))
    writer.words[at.W_ROLE] = at.LOADER_WORKER
    writer.words[at.SAMPLE_TASK] = 5
    writer.spent_ns[at.DATA] = 2_000_000_000
    writer.flush()
    workers = Workers()
    assert workers.look(tmp_path, (os.getpid(),)) == (2.0, 5)
    assert workers.look(tmp_path, ()) == (2.0, 5)


def pass_of(number: int, line: str, workers: int = 2, length: int = 8) -> page.Loader:
    return page.Loader(number, length, length, line, workers, 1, 2, 0)


def looks_at(seen: PassesSeen, *passes: page.Loader) -> None:
    """A look at a page that tells of these, the newest last."""
    seen.look(SimpleNamespace(loader_before=passes[-2] if len(passes) > 1 else None, loader=passes[-1]))  # type: ignore[arg-type]


def test_passes_of_training_when_an_evaluation_follows_each_then_the_training_loader_is_counted() -> None:
    seen = PassesSeen()
    assert seen.facts() == {}
    for number in range(1, 41, 4):  # a look at every other epoch: passes 3 and 4 of each four are not seen
        train, evaluate = (
            pass_of(number, "/t.py:9 main"),
            pass_of(number + 1, "/t.py:20 check", workers=0, length=2),
        )
        looks_at(seen, train, evaluate)
        seen.trains({"line": "/t.py:9 main", "num_workers": 2})
    looks_at(seen, pass_of(39, "/t.py:9 main"), pass_of(40, "/t.py:20 check", workers=0, length=2))
    assert seen.facts() == {
        "loader_workers": 2,
        "loader_line": "/t.py:9 main",
        "loader_length": 8,
        "loader_passes": 20,
        "loader_share": 0.8,
    }


def test_passes_when_none_is_known_to_train_then_the_newest_loader_is_told() -> None:
    seen = PassesSeen()
    looks_at(seen, pass_of(1, "/t.py:9 main", length=-1))
    assert (
        seen.facts() | {"loader_share": 1.0, "loader_passes": 1, "loader_line": "/t.py:9 main"}
        == seen.facts()
    )


def test_passes_when_the_length_of_one_is_not_known_then_nothing_is_taken_off_for_the_other() -> None:
    seen = PassesSeen()
    looks_at(seen, pass_of(1, "/t.py:9 main", length=-1), pass_of(2, "/t.py:20 check", length=100))
    seen.trains({"line": "/t.py:9 main", "num_workers": 2})
    assert (seen.facts()["loader_line"], seen.facts()["loader_share"]) == ("/t.py:9 main", 1.0)


def test_wait_for_the_first_batch_then_the_shorter_of_the_later_passes_counts() -> None:
    first = _of_pass({"number": 1, "batch_size": 8, "persistent": False, "first_s": 3.0}, {})
    assert first == {"loader_batch": 8, "loader_persistent": False}
    second = _of_pass({"number": 2, "first_s": 0.5}, first)
    assert _of_pass({"number": 3, "first_s": 0.9}, first | second) == {"loader_first_s": 0.5}


def test_processor_time_when_the_page_is_of_a_moment_before_then_it_is_of_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = [(4.0, 2.0, 8.0, 3), None, (6.0, 2.0, 8.0, 4), (7.0, 2.0, 8.0, 4)]
    monkeypatch.setattr(timeline, "_used_by", lambda _: used.pop(0))
    now = iter((20, 25, 40, 50))
    monkeypatch.setattr(timeline.time, "monotonic_ns", lambda: next(now))
    seen = timeline._Seen(Rank(0, "here", 0, 0, 1), used=(2.0, 1.0, 9.0, 0), used_ns=10)
    assert timeline._used_until(seen, 1, 15) == (3.0, 1.5, 8.0, 3)
    assert timeline._used_until(seen, 1, 25) == (4.0, 2.0, 8.0, 3)  # it has ended
    assert timeline._used_until(seen, 1, 35) == (5.5, 2.0, 8.0, 4)
    assert (
        timeline._used_until(seen, 1, 35)[0] == 6.0
    )  # the page was not written since: none of it is taken back
