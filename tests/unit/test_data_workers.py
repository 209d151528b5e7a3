"""Are loader workers as many as there are cores for, seeded apart, and gone when they should be?"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from allranks.core.errors import UsageError
from allranks.data import make_loader
from allranks.data.randomness import KeptRandomness, OwnRandomness, from_text, mix, seed_all, take, to_text
from allranks.data.worker_count import auto_num_workers
from allranks.data.worker_life import WorkerStart


@pytest.mark.parametrize(
    ("num_cores", "device", "expected"),
    [
        (1, "cpu", 0),
        (1, "cuda", 0),
        (2, "cuda", 1),
        (8, "cuda", 7),
        (32, "cuda", 8),
        (4, "cpu", 1),
        (3.9999999999, "cpu", 1),  # 1/6 six times and the like
        (2, "cpu", 0),
        (2.67, "cuda", 1),
    ],
)
def test_auto_when_cores_are_shared_leaves_some_for_the_training(
    num_cores: float, device: str, expected: int
) -> None:
    assert auto_num_workers(num_cores, device) == expected


class Workers(Dataset[Any]):
    """Says who read it."""

    tag = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return os.getpid(), -1 if info is None else info.id, self.tag


def tag_by_worker(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Workers)
    info.dataset.tag = 100 + worker_id


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_init_fn_when_given_sees_the_users_data_set(method: str) -> None:
    if method == "spawn":  # spawned workers cannot import this module by its test name
        pytest.importorskip("test_data_workers", reason="the folder of the tests is not on the path")
    theirs = DataLoader(
        Workers(),
        batch_size=2,
        num_workers=2 if method == "fork" else 1,
        worker_init_fn=tag_by_worker,
        multiprocessing_context=method,
    )
    loader = make_loader(theirs)
    rows = [
        row
        for pids, ids, tags in loader
        for row in zip(pids.tolist(), ids.tolist(), tags.tolist(), strict=True)
    ]
    assert {(i, tag) for _, i, tag in rows} == ({(0, 100), (1, 101)} if method == "fork" else {(0, 100)})
    assert os.getpid() not in {pid for pid, _, _ in rows}
    loader.close()


class Draws(IterableDataset[Any]):
    """Each worker says what its generators give."""

    def __iter__(self) -> Any:
        yield torch.randint(2**40, ()).item(), random.randrange(2**40), int(np.random.randint(2**30))


def test_generators_when_in_workers_of_ranks_differ_and_come_again() -> None:
    def drawn() -> list[tuple[int, ...]]:
        rows: list[tuple[int, ...]] = []
        for rank in range(2):
            loader = make_loader(
                Draws(),
                rank=rank,
                world_size=2,
                global_batch_size=2,
                train=False,
                sharded=True,
                num_workers=2,
            )
            for batch in loader:
                rows += zip(*(column.tolist() for column in batch), strict=True)
        return rows

    first = drawn()
    assert len(first) == 4
    for column in zip(*first, strict=True):
        assert len(set(column)) == 4
    torch.manual_seed(99)
    assert drawn() == first


def test_workers_when_the_process_group_is_signalled_go_on() -> None:
    loader = make_loader(Workers(), global_batch_size=1, num_workers=2, prefetch_factor=1)
    pids: set[int] = set()
    for number, (pid, _, _) in enumerate(loader):
        pids |= set(pid.tolist())
        if number == 2:
            for each in pids:
                for number_ in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                    os.kill(each, number_)
    assert len(pids) == 2
    assert [p for p in pids if Path(f"/proc/{p}").exists()], "persistent workers stay"
    loader.close()
    assert not [p for p in pids if Path(f"/proc/{p}").exists()]
    assert len(list(loader)) == 8  # it can be used again
    loader.close()


def test_tensors_when_workers_are_asked_for_get_them() -> None:
    data = TensorDataset(torch.arange(8))
    loader = make_loader(data, global_batch_size=4, num_workers=1)
    assert [x.tolist() for (x,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.close()


def test_unpicklable_data_set_when_workers_are_spawned_is_named() -> None:
    data = Workers()
    data.tag = lambda: 1  # type: ignore[assignment]
    loader = make_loader(data, global_batch_size=4, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(UsageError, match="AR138 the loader workers cannot be started"):
        next(iter(loader))


SCRIPT = """
    import os, sys, time
    import torch
    from torch.utils.data import Dataset
    from allranks.data import make_loader

    class Slow(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            if index: time.sleep(1000)
            return os.getpid()

    loader = make_loader(Slow(), global_batch_size=1, num_workers=int(sys.argv[2]), prefetch_factor=1)
    batches = iter(loader)
    print(next(batches).item(), *[p.pid for p in __import__("multiprocessing").active_children()], flush=True)
    if sys.argv[1] == "wait": time.sleep(1000)
"""


def start(how: str, num_workers: int, tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(script), how, str(num_workers)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def alive(pids: list[int]) -> list[int]:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return "X"

    return [pid for pid in pids if state(pid) not in "XZ"]


def test_workers_when_their_rank_is_killed_end_with_it(tmp_path: Path) -> None:
    process, pids = start("wait", 2, tmp_path)
    assert len(set(pids)) == 2 and alive(pids)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pids)


def start_for(rank: int) -> None:
    begin = WorkerStart(None, None)
    begin.parent = rank
    begin(0)


def test_worker_when_its_rank_was_killed_before_it_began_then_it_ends() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    assert gone.wait() == 0
    codes = []
    for rank in (gone.pid, os.getpid()):
        worker = multiprocessing.get_context("fork").Process(target=start_for, args=(rank,))
        worker.start()
        worker.join(60)
        codes.append(worker.exitcode)
    assert codes == [1, 0]


def test_workers_when_stuck_do_not_keep_the_rank_from_ending(tmp_path: Path) -> None:
    process, pids = start("end", 1, tmp_path)
    process.communicate(timeout=50)
    assert process.returncode == 0
    assert not alive(pids)


def test_mix_when_any_number_differs_differs() -> None:
    seeds = {mix(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1, 2) == mix(1, 2) != mix(2, 1)
    assert mix(-1) == mix(2**64 - 1)


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_own_randomness_when_used_in_turns_goes_on_and_leaves_ours_alone() -> None:
    with KeptRandomness():
        seed_all(1)
        ours = [draw() for _ in range(4)]
        seed_all(2)
        theirs = [draw() for _ in range(4)]
        seed_all(1)
        box = OwnRandomness(2)
        for k in range(4):
            assert draw() == ours[k]
            with box:
                assert draw() == theirs[k]
        saved = box.save()
        with box:
            expected = draw()
        other = OwnRandomness(0)
        other.load(saved)
        with other:
            assert draw() == expected


def test_generator_states_when_written_as_text_come_back() -> None:
    states = take()
    back = from_text(to_text(states))
    assert torch.equal(states[0], back[0]) and states[1] == back[1]
    assert list(states[2][1]) == list(back[2][1]) and states[2][2:] == back[2][2:]


# -- num_workers of `allranks run --set` ----------------------------------------------------------------------------------------


def workers_here() -> int:
    info = get_worker_info()
    return 0 if info is None else info.num_workers


class SaysWorkers(Dataset[Any]):
    """Each sample is the number of workers that read beside it, itself included."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return workers_here()


class SaysWorkersInTurn(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            yield workers_here()


class DividesItself(IterableDataset[Any]):
    """Other workers, other samples."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield from [0 if info is None else info.num_workers] * 4


def workers_of(source: Any, **settings: Any) -> set[int]:
    loader = make_loader(source, global_batch_size=2, num_workers=0, **settings)
    return {int(number) for batch in loader for number in batch}


@pytest.mark.filterwarnings("ignore:AR149")
@pytest.mark.parametrize(
    ("source", "settings", "expected"),
    [
        (SaysWorkers(), {"shuffle": True}, {2}),
        (SaysWorkers(), {}, {0}),  # for evaluation: the search measures training
        (SaysWorkersInTurn(), {"sharded": False}, {2}),
        (DividesItself(), {}, {0}),
    ],
)
def test_workers_from_outside_then_only_where_batches_do_not_depend_on_them(
    source: Any,
    settings: dict[str, Any],
    expected: set[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with mock.patch.dict(os.environ, {"ALLRANKS_SET": '{"num_workers": 2}'}):
        assert workers_of(source, **settings) == expected
    assert ("--set num_workers does not change" in caplog.text) == isinstance(source, DividesItself)
