"""Do ranks come together, is whoever is missing or double named, and does one rank's failure become the story of all?"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.core.errors import AllranksError, CommError, StartError
from support.ranks import Outcome, run_outcomes, run_ranks

pytestmark = pytest.mark.ranks


def free_port() -> int:
    """A port that nobody has now, below the range from which client sockets take theirs."""
    for port in range(20000 + os.getpid() % 9000, 32000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def by_hand(port: int) -> dict[str, str]:
    """Variables as a user sets them: rank 0 serves the store, no launcher does."""
    return {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def errors_of(outcomes: list[Outcome]) -> list[AllranksError]:
    """Every rank's error, which must be one of ours."""
    for outcome in outcomes:
        assert isinstance(outcome.error, AllranksError), outcome.story()
    return [outcome.error for outcome in outcomes]  # type: ignore[misc]


# -- coming ------------------------------------------------------------------------------------------------------------------


def sum_in_a_run() -> tuple[int, int, float]:
    with allranks.start() as run:
        return run.rank, run.world_size, run.sum(run.rank + 1)


@pytest.mark.parametrize("served_by", ["launcher", "rank 0"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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
    threads = [t.name for t in threading.enumerate() if t not in before[0]]
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


# -- failing -----------------------------------------------------------------------------------------------------------------


def fail_on(failing: list[int], kind: type[BaseException]) -> None:
    with allranks.start() as run:
        run.barrier()
        if run.rank in failing:
            raise kind("no such label: 11")
        for _ in range(1000):
            run.sum(1)


@pytest.mark.parametrize("served_by", ["launcher", "rank 0"])
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
def test_failure_when_ranks_wait_in_a_collective_then_it_is_their_story(
    failing: list[int], served_by: str
) -> None:
    env = by_hand(free_port()) if served_by == "rank 0" else {}
    outcomes = run_outcomes(3, fail_on, failing, ValueError, init=False, env=env)
    lines = Path(__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "raise kind(" in text)
    for outcome in outcomes:
        assert outcome.has_ended, outcome.story()
        if outcome.rank in failing:
            assert isinstance(outcome.error, ValueError), outcome.story()
            continue
        (error,) = errors_of([outcome])
        assert isinstance(error, CommError) and error.code == "AR020"
        host = socket.gethostname()
        stories = [f"rank {r} on host {host} failed first: ValueError: no such label: 11" for r in failing]
        assert error.what in stories
        assert f"{__file__}:{line} in fail_on" in error.why
        assert "read the traceback of rank" in error.fix


def test_failure_when_it_is_a_keyboard_interrupt_then_it_is_told_too() -> None:
    outcomes = run_outcomes(2, fail_on, [1], KeyboardInterrupt, init=False)
    assert isinstance(outcomes[1].error, KeyboardInterrupt), outcomes[1].story()
    (error,) = errors_of(outcomes[:1])
    assert error.code == "AR020" and "failed first: KeyboardInterrupt" in error.what


def fail_and_wrap() -> None:
    with allranks.start() as run:
        run.barrier()
        if run.rank == 1:
            raise ValueError("the root cause")
        try:
            for _ in range(1000):
                run.sum(1)
        except RuntimeError as error:
            raise KeyError("training failed") from error


def test_failure_when_a_rank_wraps_the_echo_then_the_cause_is_still_found() -> None:
    outcomes = run_outcomes(2, fail_and_wrap, init=False)
    (error,) = errors_of(outcomes[:1])
    assert error.code == "AR020" and "ValueError: the root cause" in error.what


def fail_in_a_barrier(where: str) -> None:
    with allranks.start(timeout_s=30) as run:
        if run.rank == 1:
            raise ValueError("before the barrier")
        if where == "barrier":
            run.barrier()
        else:
            time.sleep(0.3)  # rank 0 comes to its end in good order


@pytest.mark.parametrize("where", ["barrier", "end"])
def test_failure_when_rank_0_waits_without_a_collective_then_it_ends_at_once(where: str) -> None:
    outcomes = run_outcomes(2, fail_in_a_barrier, where, init=False, env=by_hand(free_port()))
    (error,) = errors_of(outcomes[:1])
    assert error.code == "AR020" and "ValueError: before the barrier" in error.what


def exit_on(rank: int, code: int | None) -> str:
    with allranks.start() as run:
        run.barrier()
        if run.rank == rank:
            sys.exit(code)
        for _ in range(1000):
            run.sum(1)
    return "through"


def test_exit_0_when_the_others_go_on_then_they_say_who_left() -> None:
    outcomes = run_outcomes(3, exit_on, 1, 0, init=False)
    assert isinstance(outcomes[1].error, SystemExit), outcomes[1].story()
    for error in errors_of([outcomes[0], outcomes[2]]):
        assert error.code in ("AR022", "AR020") and "rank" in error.what
    assert any(
        e.what.startswith("rank 1 left the run while rank") for e in errors_of([outcomes[0], outcomes[2]])
    )


def test_exit_3_when_the_others_go_on_then_it_is_their_story() -> None:
    outcomes = run_outcomes(2, exit_on, 1, 3, init=False)
    (error,) = errors_of(outcomes[:1])
    assert error.code == "AR020" and "SystemExit: 3" in error.what


def exit_all() -> None:
    with allranks.start() as run:
        run.barrier()
        sys.exit(0)


def test_exit_0_when_all_do_then_nothing_is_wrong() -> None:
    outcomes = run_outcomes(2, exit_all, init=False, env=by_hand(free_port()))
    assert [type(o.error) for o in outcomes] == [SystemExit, SystemExit]


# -- waiting without a collective --------------------------------------------------------------------------------------------


def rank_zero_first_longer_than_a_step() -> tuple[bool, list[str], float]:
    with allranks.start(timeout_s=0.5) as run:
        with run.rank_zero_first("the download", timeout_s=20) as is_first:
            if is_first:
                time.sleep(1.2)
                Path("data").touch()
            here = sorted(p.name for p in Path().iterdir())
        return is_first, here, run.sum(1)


def test_rank_zero_first_when_it_takes_longer_than_a_step_then_the_others_wait() -> None:
    assert run_ranks(2, rank_zero_first_longer_than_a_step, init=False) == [
        (True, ["data"], 2),
        (False, ["data"], 2),
    ]


def rank_zero_first_fails() -> None:
    with allranks.start() as run, run.rank_zero_first("the download") as is_first:
        if is_first:
            raise OSError("disk full")


def test_rank_zero_first_when_rank_0_fails_then_it_is_raised_on_all() -> None:
    outcomes = run_outcomes(3, rank_zero_first_fails, init=False)
    assert isinstance(outcomes[0].error, OSError), outcomes[0].story()
    for error in errors_of(outcomes[1:]):
        assert error.code == "AR020" and "OSError: disk full" in error.what


def rank_zero_first_too_slow() -> None:
    with allranks.start() as run, run.rank_zero_first("the download", timeout_s=0.3) as is_first:
        if is_first:
            time.sleep(1.5)


def test_rank_zero_first_when_it_takes_too_long_then_says_what_takes_long() -> None:
    (error,) = errors_of(run_outcomes(2, rank_zero_first_too_slow, init=False)[1:])
    assert (error.code, error.what) == ("AR021", "rank 0 has not finished the download within 0.3 s")


def barrier_without(absent: list[int]) -> None:
    with allranks.start() as run:
        run.barrier("before the data")  # a name may be used again
        if run.rank in absent:
            time.sleep(1.5)
        else:
            run.barrier("before the data", timeout_s=0.4)


def test_barrier_when_ranks_do_not_come_then_they_are_named() -> None:
    outcomes = run_outcomes(4, barrier_without, [1, 2], init=False)
    errors = errors_of([outcomes[0], outcomes[3]])
    assert {e.code for e in errors} <= {"AR021", "AR020"}  # whoever is later hears of the other's error
    assert "before the data: ranks 1, 2 did not come within 0.4 s" in [e.what for e in errors]


# -- after the end -----------------------------------------------------------------------------------------------------------


def use_after_the_end() -> list[str]:
    with allranks.start() as run:
        model = run.model(torch.nn.Linear(2, 1))
    codes = []
    calls = {
        "model": lambda: run.model(torch.nn.Linear(2, 1)),
        "loader": lambda: run.loader([1, 2], global_batch_size=2),
        "optimizer": lambda: run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
        "step": lambda: run.step(None),
        "backward": lambda: run.backward(None),
        "update": lambda: run.update(),
        "epochs": lambda: next(iter(run.epochs(1))),
        "log": lambda: run.log(loss=1),
        "sum": lambda: run.sum(1),
        "mean": lambda: run.mean(1),
        "gather": lambda: run.gather([1]),
        "any": lambda: run.any(True),
        "all": lambda: run.all(True),
        "agree": lambda: run.agree(1),
        "barrier": lambda: run.barrier(),
        "rank_zero_first": lambda: run.rank_zero_first().__enter__(),
        "evaluate": lambda: run.evaluate(model).__enter__(),
    }
    for name, call in calls.items():
        try:
            call()
        except AllranksError as error:
            if error.code != "AR100" or f"run.{name} after the run has ended" not in error.what:
                codes.append(f"{name}: {error.what}")
        else:
            codes.append(f"{name}: nothing")
    return codes


def test_every_method_when_the_run_is_over_then_says_so_instead_of_answering_alone() -> None:
    assert run_ranks(2, use_after_the_end, init=False) == [[], []]
