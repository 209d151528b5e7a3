"""Does the search find what is best, without being fooled by noise, crashes or the clock? Trials are made up here."""

from __future__ import annotations

import random
from typing import Any

import pytest

from allranks.core.errors import StartError
from allranks.core.overrides import SETTINGS, parse_setting, read_settings
from allranks.run.environment import cores_of
from allranks.run.options import parse
from allranks.run.trial import other_work
from allranks.tune import words
from allranks.tune.knobs import Knob, Machine, knobs_for
from allranks.tune.search import MIN_GAIN, Measured, Search
from allranks.tune.trial import WARM_UP_UPDATES, Counted, Script

KNOBS = [
    Knob("num_workers", (0, 1, 2, 4, 8), 1),
    Knob("threads", (1, 2, 4), 1),
    Knob("bucket_cap_mb", (1.0, 5.0, 25.0), 1.0),
    Knob("channels_last", (False, True), False, is_ordered=False),
]


class World:
    """A made-up machine: updates per second of settings; each trial costs 5 s on its clock."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.now, self.noise, self.random = 0.0, noise, random.Random(seed)
        self.tried: list[dict[str, Any]] = []

    def rate(self, settings: dict[str, Any]) -> float:
        workers, threads = settings.get("num_workers", 1), settings.get("threads", 1)
        feed = 30.0 * workers if workers else 20.0
        compute = 50.0 * (1 + 0.6 * (threads > 1)) * (1.1 if settings.get("channels_last") else 1.0)
        crowd = 1.0 if workers + threads <= 5 else 0.7  # together more than the cores
        return min(feed, compute) * crowd * (0.9 if settings.get("bucket_cap_mb", 1.0) < 5 else 1.0)

    def __call__(self, settings: dict[str, Any], give_up_below: float) -> Measured:
        self.now += 5.0
        self.tried.append(settings)
        rate = self.rate(settings) * (1 + self.random.gauss(0, self.noise))
        return Measured(settings, rate, self.noise)

    def search(self, minutes: float = 10.0, knobs: list[Knob] = KNOBS) -> Search:
        return Search(knobs, self, budget_s=60 * minutes, clock=lambda: self.now)


def best_rate(world: World) -> float:
    every: list[dict[str, Any]] = [{}]
    for knob in KNOBS:
        every = [{**settings, knob.name: value} for settings in every for value in knob.values]
    return max(map(world.rate, every))


def test_search_when_one_knob_is_in_the_way_of_another_then_both_are_found() -> None:
    world = World()
    found = world.search().run()
    assert world.rate(found.best.settings) >= 0.95 * best_rate(world)
    assert {w.name for w in found.kept} == set(found.best.settings)
    assert all(w.gain is not None and w.gain > 1 for w in found.kept)
    assert len(world.tried) < 35  # of 120


@pytest.mark.parametrize("seed", range(20))
def test_search_when_figures_are_noisy_then_near_the_best_and_never_worse_than_the_start(seed: int) -> None:
    world = World(noise=0.02, seed=seed)
    settings = world.search().run().best.settings
    assert world.rate(settings) >= 0.9 * best_rate(world)
    assert world.rate(settings) >= world.rate({})


def test_search_when_nothing_pays_then_it_says_so_and_keeps_the_start() -> None:
    flat = Search(
        [Knob("threads", (1, 2, 4), 2)], lambda s, _: Measured(s, 10.0), budget_s=99, clock=lambda: 0.0
    )
    found = flat.run()
    assert found.best.settings == {} and found.kept == []
    assert "nothing found" in words.report(Script("train.py"), found, 9.0)


def test_search_when_a_value_crashes_then_it_costs_one_trial_and_is_told() -> None:
    world = World()

    def measure(settings: dict[str, Any], give_up_below: float) -> Measured:
        if settings.get("num_workers", 1) > 2:
            world.now += 5.0
            return Measured(settings, 0.0, failure="out of memory")
        return world(settings, give_up_below)

    found = Search(KNOBS, measure, budget_s=600, clock=lambda: world.now).run()
    assert found.best.settings["num_workers"] == 2
    assert "out of memory" in words.report(Script("train.py"), found, 9.0)


def test_search_when_it_fails_without_a_setting_then_its_worth_is_not_known() -> None:
    world = World()

    def measure(settings: dict[str, Any], give_up_below: float) -> Measured:
        if settings.get("threads", 1) == 1 and settings.get("num_workers", 1) > 1:
            return Measured(settings, 0.0, failure="too many open files")
        return Measured(settings, 30.0 * settings.get("num_workers", 1) + settings.get("threads", 1))

    knobs = [Knob("threads", (1, 2), 1), Knob("num_workers", (1, 2), 1)]
    found = Search(knobs, measure, budget_s=600, clock=lambda: world.now).run()
    assert found.best.settings == {"threads": 2, "num_workers": 2}
    worth = {w.name: w.gain for w in found.kept}
    assert worth["threads"] is None and worth["num_workers"] == pytest.approx(62 / 32)
    assert "not measured alone" in words.report(Script("train.py"), found, 9.0)


def test_search_when_a_setting_is_dropped_at_the_end_then_the_rate_is_of_what_is_left() -> None:
    """Prefetching paid before there were more workers."""

    def measure(settings: dict[str, Any], give_up_below: float) -> Measured:
        workers = settings.get("num_workers", 1)
        return Measured(settings, 60.0 if workers > 1 else 10.0 + settings.get("prefetch_factor", 1))

    knobs = [Knob("prefetch_factor", (1, 2), 1), Knob("num_workers", (1, 2), 1)]
    found = Search(knobs, measure, budget_s=600, clock=lambda: 0.0).run()
    assert found.best == Measured({"num_workers": 2}, 60.0)
    assert [(name, value) for name, value, _ in found.did_not_pay] == [("prefetch_factor", 2)]


def test_search_when_a_value_is_that_of_the_beginning_then_it_is_not_tried_again() -> None:
    world = World()
    world.search(knobs=[Knob("num_workers", (1, 4), 1)]).run()
    assert world.tried == [{}, {"num_workers": 4}, {}, {"num_workers": 4}]


def test_search_when_the_gain_was_luck_then_its_settings_are_named_together() -> None:
    rates = iter([10.0, 12.0, 14.4] + [10.0] * 5)
    knobs = [Knob("threads", (1, 2), 1), Knob("num_workers", (1, 2), 1)]

    def measure(settings: dict[str, Any], give_up_below: float) -> Measured:
        return Measured(settings, next(rates))

    found = Search(knobs, measure, budget_s=600, clock=lambda: 0.0).run()
    assert found.best.settings == {} and found.did_not_pay == [("threads + num_workers", "2 + 2", 1.0)]


def test_search_when_the_last_look_shows_that_it_was_luck_then_the_start_is_kept() -> None:
    start, best = iter([10.0] * 9), iter([11.0, 9.0, 11.0, 8.0])

    def measure(settings: dict[str, Any], give_up_below: float) -> Measured:
        return Measured(settings, next(best if settings else start))

    found = Search([Knob("threads", (1, 2), 1)], measure, budget_s=600, clock=lambda: 0.0).run()
    assert next(best, None) is None, "the last look was made when settings were taken back"
    assert found.best.settings == {} and not found.kept
    assert found.did_not_pay == [("threads", "2", 1.0)]


def test_search_when_the_time_is_up_then_it_ends_soon_and_says_what_is_missing() -> None:
    world = World()
    found = world.search(minutes=0.75).run()
    assert world.now <= 45 + 5
    assert not found.is_complete
    assert "--minutes" in words.report(Script("train.py"), found, 45.0)


def test_search_when_the_start_fails_then_nothing_else_is_tried() -> None:
    tried: list[dict[str, Any]] = []

    def measure(settings: dict[str, Any], _: float) -> Measured:
        tried.append(settings)
        return Measured(settings, 0.0, failure="ended with exit code 1 before 5 updates:\nKeyError: 'x'")

    found = Search(KNOBS, measure, budget_s=60, clock=lambda: 0.0).run()
    assert tried == [{}]
    assert "KeyError" in words.report(Script("train.py"), found, 1.0)


def test_search_when_the_start_does_not_fit_into_memory_then_the_largest_micro_batch_that_does() -> None:
    tried: list[dict[str, Any]] = []

    def measure(settings: dict[str, Any], _: float) -> Measured:
        tried.append(settings)
        if settings.get("micro_batch_size", 32) > 11:
            return Measured(
                settings, 0.0, failure="ended with exit code 1:\ntorch.OutOfMemoryError: CUDA out of memory"
            )
        return Measured(settings, 10.0 - abs(8 - settings["micro_batch_size"]) / 50)

    knobs = [Knob("micro_batch_size", (4, 8, 11, 16, 32), 32), Knob("threads", (1, 2), 1)]
    found = Search(knobs, measure, budget_s=600, clock=lambda: 0.0).run()
    assert tried[:3] == [{}, {"micro_batch_size": 16}, {"micro_batch_size": 11}]
    assert found.best.settings == {"micro_batch_size": 11} and not found.best.failure
    text = words.report(Script("train.py"), found, 9.0)
    assert "as it is it does not run" in text and "--set micro_batch_size=11" in text


def test_search_when_a_bad_moment_hid_the_best_then_a_second_look_finds_it() -> None:
    looks: dict[int, int] = {}

    def measure(settings: dict[str, Any], _: float) -> Measured:
        threads = settings.get("threads", 1)
        looks[threads] = looks.get(threads, 0) + 1
        true = {1: 10.0, 2: 11.0}[threads]
        return Measured(settings, 10.1 if (threads, looks[threads]) == (2, 1) else true, 0.03)

    found = Search([Knob("threads", (1, 2), 1)], measure, budget_s=600, clock=lambda: 0.0).run()
    assert looks[2] > 1 and found.best.settings == {"threads": 2}


def test_search_when_one_step_changes_nothing_then_the_next_is_tried_too() -> None:
    rates = {1: 10.0, 2: 10.1, 4: 12.0, 8: 12.05, 16: 12.1, 32: 20.0}
    knobs = [Knob("num_workers", tuple(rates), 1)]
    tried: list[int] = []

    def measure(settings: dict[str, Any], _: float) -> Measured:
        tried.append(settings.get("num_workers", 1))
        return Measured(settings, rates[tried[-1]])

    found = Search(knobs, measure, budget_s=600, clock=lambda: 0.0).run()
    assert found.best.settings == {"num_workers": 4} and 32 not in tried and 16 in tried


def test_search_when_there_are_no_workers_then_how_far_they_read_ahead_is_not_tried() -> None:
    tried: list[dict[str, Any]] = []

    def measure(settings: dict[str, Any], _: float) -> Measured:
        tried.append(settings)
        return Measured(settings, 10.0)

    knobs = [
        Knob("num_workers", (0, 1), 0),
        Knob("prefetch_factor", (1, 2, 4), 2, needs="num_workers"),
    ]
    Search(knobs, measure, budget_s=600, clock=lambda: 0.0).run()
    assert not any("prefetch_factor" in settings for settings in tried)


def test_report_when_something_pays_then_the_command_line_has_it() -> None:
    found = World().search().run()
    script = Script("train.py", ("--lr", "0.1"), nproc=2)
    text = words.report(script, found, 100.0)
    assert "allranks run --nproc 2 --set num_workers=" in text and text.count("train.py --lr 0.1") == 1
    data = words.as_json(script, found, 100.0)
    given = [part for part in data["command"].split() if "=" in part]
    assert parse(["--set", given[0], "train.py"], {}).overrides.items() <= found.best.settings.items()
    assert data["gain"] > 1 + MIN_GAIN


def test_knobs_when_values_are_given_then_those_are_tried() -> None:
    values = {"num_workers": (16, 1)}
    (knob,) = knobs_for(Machine(2, 2), {"num_workers": 1}, only=("num_workers",), values=values).turned
    assert knob.values == (1, 16)


@pytest.mark.parametrize(("nproc", "free_mb", "most"), [(2, 64_000, 64), (8, 640_000, 32), (2, 4_000, 4)])
def test_knobs_when_workers_wait_for_a_disk_then_doubled_beyond_the_cores_but_not_the_memory(
    nproc: int, free_mb: int, most: int
) -> None:
    (knob,) = knobs_for(Machine(2, nproc, free_mb=free_mb), {"num_workers": 1}, only=("num_workers",)).turned
    assert knob.values[:4] == (0, 1, 2, 4) and knob.values[-1] == most


def test_knobs_when_the_script_has_no_allranks_then_only_the_launchers() -> None:
    machine = Machine(8, 2)
    assert {k.name for k in knobs_for(machine, {}).turned} == {"threads", "bind_cores"}
    in_effect = {"num_workers": 1, "rank_batch_size": 12, "accumulation_steps": 1, "precision": "fp32"}
    knobs = knobs_for(machine, in_effect)
    found = {k.name: k for k in knobs.turned}
    assert set(found) == {"threads", "bind_cores", "num_workers", "prefetch_factor", "micro_batch_size"}
    assert found["micro_batch_size"].start == 12 and {3, 4, 6, 12} <= set(found["micro_batch_size"].values)
    assert [k.name for k in knobs.left] == ["precision"]
    allowed = knobs_for(machine, in_effect, may_change_results=True)
    assert "precision" in {k.name for k in allowed.turned} and not allowed.left


def test_knobs_when_the_model_has_batch_norm_then_its_micro_batches_are_only_told() -> None:
    in_effect = {"rank_batch_size": 12, "has_batch_norm": True, "has_convolutions": True}
    knobs = knobs_for(Machine(8, 2), in_effect)
    assert [k.name for k in knobs.left] == ["micro_batch_size"]
    assert "channels_last" in {k.name for k in knobs.turned}
    found = Search([], lambda s, _: Measured(s, 10.0), budget_s=9, clock=lambda: 0.0).run()
    text = words.report(Script("train.py"), found, 1.0, knobs.left)
    assert "micro_batch_size (batch norm normalises over other samples)" in text


@pytest.mark.parametrize(("sync_every", "expected"), [(1, {"bucket_cap_mb", "compress"}), (16, set[str]())])
def test_knobs_when_ranks_send_no_gradients_then_not_how_to_send_them(
    sync_every: int, expected: set[str]
) -> None:
    in_effect = {"bucket_cap_mb": None, "compress": "none", "sync_every": sync_every}
    found = {k.name for k in knobs_for(Machine(8, 2), in_effect, may_change_results=True).turned}
    assert found & {"bucket_cap_mb", "compress"} == expected


def test_neighbours_when_ordered_then_up_and_down_from_where_it_is() -> None:
    knob = KNOBS[0]
    assert knob.neighbours(2) == ((4, 8), (1, 0))
    assert knob.neighbours(3) == ((4, 8), (2, 1, 0))
    assert knob.neighbours(8) == ((4, 2, 1, 0),)
    assert KNOBS[3].neighbours(True) == ((False,),)


@pytest.mark.parametrize(
    "given",
    [
        "nn=1",
        "num_workers=-1",
        "threads=0",
        "precision=fp8",
        "bind_cores=maybe",
        "bucket_cap_mb=0",
        "threads",
    ],
)
def test_setting_when_it_cannot_be_then_the_error_names_it(given: str) -> None:
    with pytest.raises(StartError) as raised:
        read_settings([given], {})
    assert raised.value.code == "AR043" and given.split("=")[0] in str(raised.value)


def test_settings_when_given_twice_then_the_command_line_wins() -> None:
    env = {"ALLRANKS_SET": '{"num_workers": 2, "threads": 1}'}
    assert read_settings(["num-workers=4"], env) == {"num_workers": 4, "threads": 1}
    assert all(parse_setting(name, s.choices[0]) for name, s in SETTINGS.items() if s.kind == "choice")


def test_cores_when_divided_then_each_rank_has_its_own() -> None:
    assert [cores_of(k, 2, {0, 1, 2, 3, 8}) for k in range(2)] == [[0, 1], [2, 3, 8]]
    assert [cores_of(k, 3, {4, 5}) for k in range(3)] == [[4], [5], [4]]


def test_other_work_when_the_cores_are_taken_then_said_before_the_trials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    assert other_work() == ""
    monkeypatch.setattr("os.getloadavg", lambda: (512.0, 0.0, 0.0))
    assert "a load of 512.0" in other_work()


def test_counted_when_steps_are_even_then_their_rate_and_little_spread() -> None:
    counted = Counted()
    counted.ends = {step: 100.0 + 0.01 * step for step in range(WARM_UP_UPDATES, 205)}
    rate, spread = counted.figure()
    assert rate == pytest.approx(100.0) and spread < 1e-6
    assert counted.is_enough(2.0, 0.0) and not counted.is_cut_short
    assert not Counted().is_enough(0.0, 200.0)
    assert counted.is_enough(4.0, 200.0) and counted.is_cut_short


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_counted_when_workers_deliver_in_bunches_then_the_rate_is_that_of_all(workers: int) -> None:
    """Batches of all workers come together, every 80 ms: the median interval is that within a bunch."""
    counted = Counted()
    counted.ends = {
        k: 0.08 * (k // workers) + 1e-4 * (k % workers) for k in range(WARM_UP_UPDATES, 12 * workers)
    }
    rate, _ = counted.figure()
    assert rate == pytest.approx(workers / 0.08, rel=0.05)


def test_counted_when_updates_are_few_then_it_looks_longer_and_is_less_sure() -> None:
    counted = Counted()
    counted.ends = {5: 0.0, 6: 3.0}
    assert not counted.is_enough(2.0, 0.0) and not counted.is_enough(2.0, 99.0)
    assert counted.is_enough(0.5, 0.0)
    rate, spread = counted.figure()
    assert rate == pytest.approx(1 / 3) and 0.02 < spread < 0.5
