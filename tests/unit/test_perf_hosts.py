"""Is what hosts say of themselves (cores, links, GPUs, /dev/shm) read, and named where it is the reason?"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pytest

from allranks.perf.causes import Cause, find_causes
from allranks.perf.history import read_history
from allranks.perf.values import History
from allranks.perf.view import View
from allranks.report.making import Times
from allranks.report.words import first_step_text, samples_a_second
from allranks.watch import gpu_use, host_use
from support.histories import Doing, write_history

BUSY: dict[str, Any] = {"affinity": 8, "omp_threads": 1}


def history(folder: Path, ranks: list[Doing], **more: Any) -> History:
    return read_history(write_history(folder, ranks, **more))


def found(folder: Path, ranks: list[Doing], **more: Any) -> dict[str, Cause]:
    return {cause.code: cause for cause in find_causes(View(history(folder, ranks, **more)))}


def of_others(cores: float) -> Any:
    """This job uses 1.5 cores, others so many."""
    return lambda node, t: {"job_cpu_s": 50 + 1.5 * t, "host_cpu_s": 9000 + (1.5 + cores) * t}


# --- cores ---


def test_ranks_without_cores_beside_others_then_the_script_is_not_blamed(tmp_path: Path) -> None:
    ranks = [Doing(queue_share=0.4, facts=BUSY), Doing(queue_share=0.4, facts=BUSY)]
    cause = found(tmp_path, ranks, looks=of_others(0.9))["AR805"]
    assert "processes that are not this job's have 0.9 of them" in cause.title
    assert "the script is not the cause" in cause.fix


def test_ranks_without_cores_and_no_others_then_their_own_threads_are_named(tmp_path: Path) -> None:
    ranks = [Doing(queue_share=0.4, facts=BUSY), Doing(queue_share=0.4, facts=BUSY)]
    cause = found(tmp_path, ranks, looks=of_others(0.02))["AR805"]
    assert "the ranks' own threads" in cause.title and "other" not in cause.title


def test_long_exchange_beside_others_then_it_is_said_that_it_was_measured_so(tmp_path: Path) -> None:
    ranks = [Doing(queue_share=0.4, facts=BUSY), Doing(queue_share=0.4, facts=BUSY)]
    beside = found(tmp_path / "a", ranks, looks=of_others(1.2), exchange_ms=20.0)["AR807"]
    alone = found(tmp_path / "b", ranks, looks=of_others(0.0), exchange_ms=20.0)["AR807"]
    assert "measured while other processes had 1.2 cores" in beside.facts[-1]
    assert not any("measured while" in fact for fact in alone.facts)


@pytest.mark.parametrize(
    "cores, why", [(0.8, "other processes on node0"), (0.0, "of this job take its cores")]
)
def test_straggler_without_cores_then_who_has_them_is_known(tmp_path: Path, cores: float, why: str) -> None:
    ranks = [Doing(facts=BUSY), Doing(forward=18, queue_share=0.5, facts=BUSY)]
    cause = found(tmp_path, ranks, looks=of_others(cores))["AR800"]
    assert why in cause.title
    assert ("the script is not the cause" in cause.fix) == (cores > 0)


def test_straggler_where_others_have_the_cores_of_all_ranks_then_only_the_load_is_said(
    tmp_path: Path,
) -> None:
    ranks = [Doing(queue_share=0.3, facts=BUSY), Doing(forward=12, queue_share=0.7, facts=BUSY)]
    assert set(found(tmp_path / "a", ranks, looks=of_others(1.5))) == {"AR805"}
    ranks[1].queue_share = 0.3  # its work is more, whatever the load
    assert "AR800" in found(tmp_path / "b", ranks, looks=of_others(1.5))


@pytest.mark.parametrize("cpus, is_said", [([[0], [0]], True), ([[0], [1]], False), ([[0], [0, 1]], False)])
def test_ranks_that_share_one_core_of_two_then_it_is_said(
    tmp_path: Path, cpus: list[list[int]], is_said: bool
) -> None:
    ranks = [Doing(queue_share=0.4, facts={"affinity": len(c), "cpus": c, "loader_workers": 2}) for c in cpus]
    said = found(tmp_path, ranks, facts={"cores": 2})
    assert ("AR804" in said) == is_said
    assert ("AR802" in said) != is_said
    if is_said:
        assert "its 2 loader workers share it" in said["AR804"].facts[0]


# --- /dev/shm and loader workers ---


@pytest.mark.parametrize("share, workers, is_said", [(0.9, 2, True), (0.5, 2, False), (0.9, 0, False)])
def test_shm_nearly_full_then_it_is_said_with_numbers(
    tmp_path: Path, share: float, workers: int, is_said: bool
) -> None:
    ranks = [Doing(facts={"loader_workers": workers}), Doing(facts={"loader_workers": workers})]
    said = found(
        tmp_path,
        ranks,
        facts={"shm_bytes": 64_000_000},
        looks=lambda node, t: {"shm_used": int(share * 64e6)},
    )
    assert ("AR818" in said) == is_said
    if is_said:
        assert "90% full (58 of 64 MB): 2 ranks with 2 loader workers each" in said["AR818"].title


@pytest.mark.parametrize(
    "facts, is_said",
    [
        ({}, True),
        ({"loader_persistent": True}, False),
        ({"loader_first_s": 0.01}, False),
        ({"loader_passes": 1}, False),
    ],
)
def test_workers_started_in_each_pass_then_said_where_it_costs(
    tmp_path: Path, facts: dict[str, Any], is_said: bool
) -> None:
    known = {"loader_workers": 2, "loader_persistent": False, "loader_first_s": 0.8, "loader_passes": 6}
    ranks = [Doing(data=20.0, facts=known | facts), Doing(data=20.0, facts=known | facts)]
    said = found(tmp_path, ranks)
    assert ("AR819" in said) == is_said
    if is_said:
        assert "2 loader workers anew in each pass: 800 ms until its first batch" in said["AR819"].title


def test_workers_started_in_each_pass_then_they_cost_no_more_than_all_waits_for_data(tmp_path: Path) -> None:
    known = {"loader_workers": 2, "loader_persistent": False, "loader_first_s": 0.8, "loader_passes": 6}
    said = found(tmp_path, [Doing(data=3.0, facts=known), Doing(data=3.0, facts=known)])
    assert said["AR819"].share == pytest.approx(3.0 / 24.0, abs=0.01)


# --- links ---


def links(resent: tuple[float, float], queued: tuple[int, int]) -> Any:
    """A thousand segments a second of each host."""
    return lambda node, t: {
        "sent": int(5000 + 1000 * t),
        "resent": int(1000 * t * resent[node]),
        "queued": queued[node],
    }


@pytest.mark.parametrize(
    "resent, queued, host",
    [
        ((0.0, 0.04), (0, 0), "node1"),
        ((0.03, 0.0), (0, 0), "node0"),
        ((0.0, 0.0), (0, 300_000), "node1"),
        ((0.0001, 0.0), (2_000, 3_000), ""),
        ((0.02, 0.02), (0, 0), ""),
    ],
)
def test_link_of_one_host_that_loses_or_holds_back_then_that_host_is_named(
    tmp_path: Path, resent: tuple[float, float], queued: tuple[int, int], host: str
) -> None:
    said = found(tmp_path, [Doing(), Doing()], nodes=2, exchange_ms=25.0, looks=links(resent, queued))
    assert ("AR815" in said) == bool(host)
    assert ("AR807" in said) != bool(host)
    if host:
        assert f"the link of {host} is the slow one" in said["AR815"].title


def held(*pairs: tuple[int, int]) -> Any:
    """A ring of three hosts: who holds back what it sends to whom."""

    def looks(node: int, t: float) -> dict[str, Any]:
        there = {f"10.0.0.{to}": 150_000 for one, to in pairs if one == node and int(2 * t) % 3}
        there[f"10.0.0.{(node + 1) % 3}"] = there.get(f"10.0.0.{(node + 1) % 3}", 48)
        counts = {"sent": int(5000 + 1000 * t), "queued": sum(there.values())}
        return {**counts, "held": there, "addresses": [f"10.0.0.{node}"]}

    return looks


@pytest.mark.parametrize(
    "pairs, host",
    [
        (((1, 2), (0, 1)), "node1"),  # both ways: who sends to it waits as long as it does
        (((1, 0), (1, 2)), "node1"),
        (((0, 1), (2, 1)), "node1"),
        (((0, 1), (1, 2), (2, 0)), ""),  # all links are full
        ((), ""),
    ],
)
def test_connections_that_hold_back_then_the_host_that_all_of_them_have_in_common_is_named(
    tmp_path: Path, pairs: tuple[tuple[int, int], ...], host: str
) -> None:
    said = found(tmp_path, [Doing(), Doing(), Doing()], nodes=3, exchange_ms=25.0, looks=held(*pairs))
    assert ("AR815" in said) == bool(host)
    if host:
        assert f"the link of {host} is the slow one" in said["AR815"].title


def test_lost_segments_that_cost_nothing_then_nothing_is_said(tmp_path: Path) -> None:
    assert not found(tmp_path, [Doing(), Doing()], nodes=2, looks=links((0.0, 0.05), (0, 0)))


# --- GPUs ---


def gpus(rows: list[list[int]]) -> Any:
    return lambda node, t: {"gpus": rows}


@pytest.mark.parametrize(
    "row, why",
    [
        ([1, 900, 1980, 91, 0x20, 98], "held back by heat"),
        ([1, 1000, 1980, 60, 0x80, 98], "held back by the power supply"),
        ([1, 1200, 1980, 60, 0x04, 98], "held back by its power limit"),
        ([1, 1200, 1980, 50, 0x0, 98], "held back by a lower clock that was set"),
        ([1, 1850, 1980, 70, 0x04, 98], ""),
        ([1, 300, 1980, 40, 0x01, 0], ""),
    ],
)
def test_gpu_below_its_clock_then_rank_clock_and_reason_are_said(
    tmp_path: Path, row: list[int], why: str
) -> None:
    others = [[rank, 1900, 1980, 65, 0x04, 97] for rank in (0, 2)]
    said = found(tmp_path, [Doing(), Doing(), Doing()], steps=600, looks=gpus([*others, row]))
    assert ("AR817" in said) == bool(why)
    if why:
        assert f"the GPU of rank 1 is {why}" in said["AR817"].title
        assert f"{row[1]} of 1980 MHz, {row[3]} degrees" in said["AR817"].title


def test_straggler_with_a_hot_gpu_then_that_is_why(tmp_path: Path) -> None:
    rows = [[0, 1900, 1980, 65, 0, 97], [1, 900, 1980, 92, 0x40, 99]]
    cause = found(tmp_path, [Doing(), Doing(backward=24, cpu_share=0.3)], looks=gpus(rows))["AR800"]
    assert "its GPU is held back by heat" in cause.title
    assert not any("not decided" in fact for fact in cause.facts)


class FakeDevice:
    def __init__(self, pids: list[int], clock: int) -> None:
        self.pids, self.clock = pids, clock


def fake_nvml(devices: list[FakeDevice]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=lambda k: devices[k],
        nvmlDeviceGetComputeRunningProcesses=lambda d: [types.SimpleNamespace(pid=p) for p in d.pids],
        nvmlDeviceGetClockInfo=lambda d, kind: d.clock,
        nvmlDeviceGetMaxClockInfo=lambda d, kind: 1980,
        nvmlDeviceGetTemperature=lambda d, sensor: 71,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda d: 0x20,
        nvmlDeviceGetUtilizationRates=lambda d: types.SimpleNamespace(gpu=93),
    )


def test_gpus_then_each_rank_gets_the_one_that_its_process_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [FakeDevice([11], 1200), FakeDevice([10], 1900), FakeDevice([], 300)]
    monkeypatch.setattr(gpu_use.importlib, "import_module", lambda name: fake_nvml(devices))
    looking = gpu_use.Gpus()
    assert looking.look({0: 10, 1: 11}) == [[0, 1900, 1980, 71, 0x20, 93], [1, 1200, 1980, 71, 0x20, 93]]
    assert looking.look({0: 10, 1: 11}) == []  # not yet due again


def test_gpus_without_nvml_then_nothing_is_said_and_it_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(name: str) -> Any:
        asked.append(name)
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(gpu_use.importlib, "import_module", missing)
    monkeypatch.setattr(gpu_use, "LOOK_EVERY_S", 0.0)
    looking = gpu_use.Gpus()
    assert (looking.look({0: 1}), looking.look({0: 1}), asked) == ([], [], ["pynvml"])


# --- what an agent reads ---


def test_host_then_its_own_process_counts_as_the_jobs(tmp_path: Path) -> None:
    looking = host_use.HostUse(True)
    first = looking.look({0: os.getpid()}, [])
    sum(k * k for k in range(2_000_000))
    second = looking.look({0: os.getpid()}, [])
    assert second["job_cpu_s"] > first["job_cpu_s"]
    assert second["host_cpu_s"] - first["host_cpu_s"] >= 0
    assert second["sent"] >= first["sent"] and second["queued"] >= 0
    assert second["shm_used"] >= 0


def test_shared_memory_when_it_was_fuller_between_two_looks_then_the_most_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, free = host_use.HostUse(False), iter((80, 20, 70, 70, 60))
    monkeypatch.setattr(host_use.proc, "space", lambda _: (100, next(free)))
    for _ in range(3):
        looking.peek()
    told = [looking.look({}, [])["shm_used"] for _ in range(2)]
    assert told == [80, 40]


def test_busy_of_host_then_idle_and_waiting_for_disks_are_not() -> None:
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    text = "cpu  100 20 30 9999 8888 1 2 7 50 0\ncpu0 1 1 1 1"
    assert host_use.busy_of_host(text) == pytest.approx(160 * tick)
    assert host_use.busy_of_host("") is None


# --- what is said of speed ---


def test_samples_a_second_then_of_all_ranks_or_not_at_all(tmp_path: Path) -> None:
    def times(folder: str, *sizes: int) -> Times:
        ranks = [Doing(facts={"loader_batch": size} if size else {}) for size in sizes]
        view = View(history(tmp_path / folder, ranks))
        return Times(view.history, view.found)

    both = times("a", 32, 32)
    speed = samples_a_second(both)
    assert speed == pytest.approx(64 / both.parts.ranks[0].step_s, rel=0.02)
    assert samples_a_second(times("b", 32, 0)) is None
    halves = [Doing(facts={"loader_batch": 32, "loader_share": 0.5})] * 2  # the other half is evaluated
    view = View(history(tmp_path / "c", halves))
    assert samples_a_second(Times(view.history, view.found)) == pytest.approx(
        32 / both.parts.ranks[0].step_s, rel=0.02
    )
    assert first_step_text(both) == ""


def test_job_when_a_worker_has_ended_then_its_time_does_not_become_that_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = {1: 10.0, 7: 30.0}  # a rank, and its loader worker
    monkeypatch.setattr(host_use, "_ticks", lambda pid, count: used.get(pid))
    monkeypatch.setattr(host_use.proc, "children", lambda pid: [p for p in used if p != pid])
    looking = host_use.HostUse(False)
    first = looking._of_job([1], [])  # a child that is no loader worker counts, too
    assert first >= 40.0
    del used[7]  # it has ended, and the rank has not waited for it
    assert looking._of_job([1], []) >= first
