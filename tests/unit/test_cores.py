"""How many cores and threads does a rank get: affinity, cgroup quotas of both versions, fair shares, the user's own number?"""

from __future__ import annotations

import os
import threading as threading_module
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from allranks.comm import threads
from allranks.comm.threads import share_threads
from allranks.core import cores
from allranks.core.cores import cpu_quota, is_core_for_each, share_of_cores, usable_cores
from allranks.core.place import Place


def tree(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """A fake /proc and /sys/fs/cgroup."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/pod/box\n", "cgroup/pod/cpu.max": "400000 100000\n"}, 4.0),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "cgroup/pod/cpu.max": "200000 100000\n",
                "cgroup/pod/box/cpu.max": "300000 100000\n",
            },
            2.0,  # the tightest of the ancestors
        ),
        ({"proc/self/cgroup": "0::/not/below/the/mount\n", "cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n",
                "cgroup/cpu/docker/x/cpu.cfs_quota_us": "250000\n",
                "cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/\n",
                "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "rubbish\n"}, None),
    ],
)
def test_cpu_quota_when_cgroups_limit_then_in_cores(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(*tree(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("cpu_max", "expected"), [("150000 100000", 2), ("1000 100000", 1), ("max 100000", 64)]
)
def test_usable_cores_when_a_quota_is_below_the_affinity_then_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_max: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert (
        usable_cores(*tree(tmp_path, {"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": cpu_max})) == expected
    )


def test_usable_cores_when_the_affinity_is_below_the_quota_then_the_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    folders = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "800000 100000"})
    assert usable_cores(*folders) == 2


def test_usable_cores_when_there_is_no_affinity_then_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 10)
    assert usable_cores(tmp_path, tmp_path) == 10


ALL16, FIRST4 = frozenset(range(16)), frozenset(range(4))


@pytest.mark.parametrize(
    ("on_this_host", "usable", "share"),
    [
        ([FIRST4], 4, 4),
        ([FIRST4] * 2, 4, 2),
        ([FIRST4, frozenset(range(4, 8))], 4, 4),  # Slurm bound each to four of its own
        ([FIRST4, frozenset({3, 4})], 4, 3.5),
        ([FIRST4, ALL16], 4, 2),
        ([FIRST4] * 2, 2, 1),  # a quota of two cores for both
    ],
)
def test_share_of_cores_then_own_cores_count_whole_and_shared_ones_in_part(
    on_this_host: list[frozenset[int]], usable: int, share: float
) -> None:
    assert share_of_cores(FIRST4, on_this_host, usable) == share


@pytest.mark.parametrize(
    ("on_this_host", "usable", "expected"),
    [
        ([frozenset({0}), frozenset({1})], 1, True),  # each bound to a core of its own
        ([FIRST4] * 4, 4, True),
        ([frozenset(range(6))] * 6, 6, True),  # 1/6 six times is less than 1 in floats
        ([FIRST4] * 5, 4, False),
        ([frozenset({0})] * 2, 1, False),
        ([FIRST4] * 4, 2, False),  # a quota
        ([ALL16, frozenset({0}), frozenset({0})], 16, False),
    ],
)
def test_is_core_for_each_then_only_where_no_rank_must_share_one(
    on_this_host: list[frozenset[int]], usable: int, expected: bool
) -> None:
    assert is_core_for_each(on_this_host, usable) == expected


# -- threads -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    monkeypatch.setattr(threads, "affinity", lambda: frozenset(range(16)))
    with mock.patch.dict(os.environ):
        for name in ("OMP_NUM_THREADS", "ALLRANKS_OMP"):
            os.environ.pop(name, None)
        yield
    torch.set_num_threads(before)


def place(launcher: str, local_world_size: int) -> Place:
    return Place(0, local_world_size, 0, local_world_size, 0, 1, "h", launcher, "", "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("launcher", "local_ranks", "env", "expected", "note"),
    [
        (
            "torchrun",
            4,
            {"OMP_NUM_THREADS": "1"},
            4,
            "4 intra-op threads: 16 usable cores among 4 local ranks",
        ),
        (
            "torchrun",
            3,
            {"OMP_NUM_THREADS": "1"},
            5,
            "5 intra-op threads: 16 usable cores among 3 local ranks",
        ),
        (
            "torchrun",
            32,
            {"OMP_NUM_THREADS": "1"},
            1,
            "1 intra-op thread: 16 usable cores among 32 local ranks",
        ),
        ("torchrun", 1, {}, 16, "16 intra-op threads: 16 usable cores among 1 local rank"),
        ("Slurm", 2, {}, 8, "8 intra-op threads: 16 usable cores among 2 local ranks"),
        (
            "allranks run",
            4,
            {"OMP_NUM_THREADS": "2", "ALLRANKS_OMP": "agent"},
            4,
            "4 intra-op threads: 16 usable",
        ),
    ],
)
def test_threads_when_the_user_says_nothing_then_a_fair_share(
    launcher: str, local_ranks: int, env: dict[str, str], expected: int, note: str
) -> None:
    os.environ.update(env)
    assert share_threads(place(launcher, local_ranks)).startswith(note)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("launcher", "number"), [("torchrun", "3"), ("Slurm", "1"), ("environment", "1"), ("alone", "2")]
)
def test_threads_when_omp_num_threads_is_the_users_then_kept(launcher: str, number: str) -> None:
    os.environ["OMP_NUM_THREADS"] = number
    torch.set_num_threads(int(number))  # as torch does when it is imported
    assert f"as OMP_NUM_THREADS={number} says" in share_threads(place(launcher, 2))
    assert torch.get_num_threads() == int(number)


def test_threads_when_asked_for_then_exactly_that() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    assert share_threads(place("torchrun", 4), 6) == "6 intra-op threads, as asked"
    assert torch.get_num_threads() == 6


def test_threads_when_the_launcher_bound_each_rank_then_its_own_cores_are_not_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    monkeypatch.setattr(threads, "affinity", lambda: FIRST4)
    note = share_threads(place("Slurm", 2), None, [FIRST4, frozenset(range(4, 8))])
    assert note == "4 intra-op threads: 4 usable cores that this rank shares with 0 of 1 other local ranks"
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
def test_thread_when_it_stands_back_then_it_alone_does() -> None:
    found: list[int] = []

    def looks_on() -> None:
        cores.stand_back()
        found.append(os.sched_getscheduler(0))

    thread = threading_module.Thread(target=looks_on)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
@pytest.mark.parametrize("policy", ["SCHED_FIFO", "SCHED_IDLE"])
def test_thread_when_the_user_chose_its_policy_then_it_stays(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    chosen: list[object] = []
    monkeypatch.setattr(cores.os, "sched_getscheduler", lambda _: getattr(os, policy))
    monkeypatch.setattr(cores.os, "sched_setscheduler", lambda *given: chosen.append(given))
    cores.stand_back()
    assert chosen == []


def test_thread_when_the_system_forbids_to_stand_back_then_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(cores.os, "sched_setscheduler", refuse, raising=False)
    cores.stand_back()
    monkeypatch.delattr(cores.os, "sched_setscheduler")
    cores.stand_back()
