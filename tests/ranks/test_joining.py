"""Do ranks come together, is whoever is missing or double named, and is nothing left when they part?"""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import allranks
from allranks.core.errors import StartError
from support.by_hand import by_hand, errors_of, free_port
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks


# -- coming ------------------------------------------------------------------------------------------------------------------


def sum_in_a_run() -> tuple[int, int, float]:
    with allranks.start() as run:
        return run.rank, run.world_size, run.sum(run.rank + 1)


@pytest.mark.parametrize(
    ("world_size", "served_by"),
    [(1, "launcher"), (2, "launcher"), (3, "rank 0"), (4, "launcher"), (2, "rank 0")],
)
def test_start_when_all_ranks_come_then_they_form_a_world(world_size: int, served_by: str) -> None:
    env = by_hand(free_port()) if served_by == "rank 0" else {}
    results = run_ranks(world_size, sum_in_a_run, init=False, env=env)
    assert results == [(r, world_size, world_size * (world_size + 1) / 2) for r in range(world_size)]


def start_unless(absent: list[int]) -> None:
    if int(os.environ["RANK"]) in absent:
        return
    with allranks.start(start_timeout_s=1.5):
        raise AssertionError("the ranks met without all of them")


@pytest.mark.parametrize("served_by", ["launcher", "rank 0"])
def test_start_when_ranks_do_not_come_then_all_who_wait_name_them(served_by: str) -> None:
    env = by_hand(free_port()) if served_by == "rank 0" else {}
    outcomes = run_outcomes(4, start_unless, [1, 3], init=False, env=env)
    for error in errors_of([outcomes[0], outcomes[2]]):
        assert (error.code, error.what) == ("AR008", "ranks 1, 3 of 4 did not arrive in 1.5 s")
        assert f"rank 0 on {socket.gethostname()}, rank 2 on {socket.gethostname()}" in error.why
        assert "start_timeout_s" in error.fix


def test_start_when_rank_0_does_not_come_then_says_that_nobody_listens() -> None:
    port = free_port()
    outcomes = run_outcomes(2, start_unless, [0], init=False, env=by_hand(port))
    (error,) = errors_of(outcomes[1:])
    assert (error.code, error.what) == (
        "AR011",
        f"rank 1 could not reach rank 0 at 127.0.0.1:{port} in 1.5 s",
    )
    assert "refused" in error.why and "is rank 0 running" in error.fix


def start_at_a_name(name: str) -> None:
    os.environ["MASTER_ADDR"] = name
    with allranks.start(start_timeout_s=0.5):
        raise AssertionError("a name that leads nowhere led somewhere")


def test_start_when_the_address_has_no_host_then_says_so() -> None:
    outcomes = run_outcomes(2, start_at_a_name, "no-such-host.invalid", init=False)
    for error in errors_of(outcomes):
        assert error.code == "AR011" and "does not know the name no-such-host.invalid" in error.fix


def start_as(ranks: list[int], world_sizes: list[int]) -> None:
    mine = int(os.environ["RANK"])
    os.environ.update(RANK=str(ranks[mine]), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ["WORLD_SIZE"] = str(world_sizes[mine])
    with allranks.start(start_timeout_s=20):
        raise AssertionError("ranks that contradict each other met")


@pytest.mark.parametrize("served_by", ["launcher", "rank 0"])
def test_start_when_two_are_the_same_rank_then_all_learn_it_at_once(served_by: str) -> None:
    env = by_hand(free_port()) if served_by == "rank 0" else {}
    outcomes = run_outcomes(3, start_as, [0, 1, 1], [3, 3, 3], init=False, env=env)
    for error in errors_of(outcomes):
        assert error.code == "AR009"
        assert error.what.startswith("two processes say they are rank 1 of 3: pid ")
        assert error.what.count(f"on {socket.gethostname()}") == 2


@pytest.mark.parametrize("served_by", ["launcher", "rank 0"])
def test_start_when_world_sizes_differ_then_both_are_named_at_once(served_by: str) -> None:
    env = by_hand(free_port()) if served_by == "rank 0" else {}
    outcomes = run_outcomes(2, start_as, [0, 1], [4, 2], init=False, env=env)
    host = socket.gethostname()
    for error in errors_of(outcomes):
        assert error.code == "AR010"
        assert error.what == f"rank 1 on {host} says the world size is 2, rank 0 on {host} says 4"


def test_start_when_the_port_is_taken_then_says_so_at_once() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (error,) = errors_of(run_outcomes(2, start_unless, [1], init=False, env=by_hand(port))[:1])
    assert (error.code, error.what) == (
        "AR011",
        f"rank 0 cannot listen on port {port} of {socket.gethostname()}",
    )
    assert "another process has this port" in error.why and "MASTER_PORT=" in error.fix


# -- groups that are there already -------------------------------------------------------------------------------------------


def start_in_a_group() -> tuple[float, float, bool]:
    with allranks.start() as run:
        first = run.sum(1)
        run.barrier("once")
    with allranks.start() as run:
        second = run.sum(2)
        run.barrier("once")
    return first, second, dist.is_initialized()


def test_start_when_a_group_exists_then_uses_it_and_leaves_it() -> None:
    assert run_ranks(2, start_in_a_group) == [(2, 4, True)] * 2


def start_in_another_group() -> str:
    os.environ["RANK"] = str(1 - int(os.environ["RANK"]))
    with pytest.raises(StartError) as caught, allranks.start():
        pass
    return caught.value.what


def test_start_when_the_group_has_other_ranks_then_names_both() -> None:
    first, _ = run_ranks(2, start_in_another_group)
    assert first == "a process group exists with rank 0 of 2, but the launcher's variables say rank 1 of 2"


# -- leaving -----------------------------------------------------------------------------------------------------------------


def what_is_left() -> tuple[list[str], dict[str, str], bool]:
    before = (set(threading.enumerate()), dict(os.environ))
    with allranks.start() as run:
        run.barrier()
        run.log(loss=1.0)
    # The record's thread is the process's, not the run's: it ends with the process.
    threads = [t.name for t in threading.enumerate() if t not in before[0] and t.name != "allranks-record"]
    changed = {k: v for k, v in os.environ.items() if before[1].get(k) != v}
    return threads, changed, dist.is_initialized()


def test_leaving_then_no_thread_variable_or_group_is_left() -> None:
    assert run_ranks(2, what_is_left, init=False) == [([], {}, False)] * 2


def start_three_times() -> list[float]:
    sums = []
    for turn in range(3):
        with allranks.start() as run:
            with run.rank_zero_first("the download") as is_first:
                assert is_first == run.is_rank_zero
            run.barrier()
            sums.append(run.sum(turn))
    return sums


@pytest.mark.parametrize("served_by", ["launcher", "rank 0"])
def test_start_when_run_after_run_in_one_process_then_each_is_new(served_by: str) -> None:
    env = by_hand(free_port()) if served_by == "rank 0" else {}
    assert run_ranks(2, start_three_times, init=False, env=env) == [[0, 2, 4]] * 2


def leave_late() -> bool:
    with allranks.start() as run:
        run.barrier()
        if not run.is_rank_zero:
            time.sleep(1)  # rank 0 is through its block meanwhile
            Path("late").touch()
            return run._membership.store.check(["left/0"])
    return Path("late").exists()


def test_leaving_when_rank_0_is_first_then_its_store_outlives_the_others() -> None:
    assert run_ranks(2, leave_late, init=False, env=by_hand(free_port())) == [True, True]
