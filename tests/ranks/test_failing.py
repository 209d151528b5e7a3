"""Does one rank's failure become the story of all, wherever they wait, and does a run that is over refuse to answer?"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
import torch

import allranks
from allranks.core.errors import AllranksError, CommError
from support.by_hand import by_hand, errors_of, free_port
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks


# -- failing -----------------------------------------------------------------------------------------------------------------


def fail_on(failing: list[int], kind: type[BaseException]) -> None:
    with allranks.start() as run:
        run.barrier()
        if run.rank in failing:
            raise kind("no such label: 11")
        for _ in range(1000):
            run.sum(1)


@pytest.mark.parametrize(
    ("failing", "served_by"),
    [([0], "launcher"), ([1], "launcher"), ([0], "rank 0"), ([1], "rank 0"), ([0, 1], "rank 0")],
)
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
