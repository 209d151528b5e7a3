"""Does the harness for ranks tell the truth: results, the first cause, who did not end, what is left?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from support.processes import is_alive
from support.ranks import run_outcomes, run_ranks, tell

pytestmark = pytest.mark.ranks


def sum_of_ranks(offset: int) -> tuple[int, int]:
    value = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_run_ranks_when_all_return_then_results_in_order_of_rank(world_size: int) -> None:
    total = sum(range(world_size)) + 10 * world_size
    assert run_ranks(world_size, sum_of_ranks, 10) == [(rank, total) for rank in range(world_size)]


def environment() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MINE")
    return {name: os.environ[name] for name in names}


def test_run_ranks_then_environment_is_torchruns_and_the_tests_own() -> None:
    first, second = run_ranks(2, environment, init=False, env={"MINE": "yes"})
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MINE": "yes"}
    assert first == {"RANK": "0", "LOCAL_RANK": "0", **shared}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", **shared}


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the root cause")
    dist.all_reduce(torch.ones(1))


def test_run_ranks_when_one_rank_raises_then_its_traceback_comes_before_the_victims() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, raise_on_rank_1)
    text = str(caught.value)
    assert text.startswith("3 of 3 ranks failed")
    assert text.index("rank 1 raised") < text.index("rank 0 raised")
    assert "KeyError: 'the root cause'" in text


def sleep_on_rank_1() -> None:
    print("printed before the sleep", flush=True)
    if dist.get_rank() == 1:
        time.sleep(100)


def test_run_outcomes_when_a_rank_does_not_end_then_its_stack_and_output_are_kept() -> None:
    good, hung = run_outcomes(2, sleep_on_rank_1, timeout_s=3)
    assert good.is_good and not hung.has_ended
    assert "sleep_on_rank_1" in hung.stack
    assert "printed before the sleep" in hung.output
    assert "rank 1 had not ended" in tell([good, hung])


def kill_rank_1() -> str:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_run_ranks_when_a_death_is_part_of_the_test_then_the_others_results_come() -> None:
    assert run_ranks(2, kill_rank_1, may_die=[1]) == ["alive", None]
    assert run_outcomes(2, kill_rank_1)[1].exit_signal == signal.SIGKILL


def leave_a_process() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid


def test_run_outcomes_when_a_process_is_left_behind_then_it_is_named_and_ended() -> None:
    (outcome,) = run_outcomes(1, leave_a_process, init=False)
    assert "time.sleep(100)" in outcome.left_behind[0]
    assert not outcome.is_good
    assert not is_alive(outcome.result)


def return_a_tensor() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def test_run_ranks_when_tensors_are_returned_then_they_outlive_their_rank() -> None:
    assert [t.sum().item() for t in run_ranks(2, return_a_tensor)] == [0.0, 3.0]


def exit_too_early() -> None:
    os._exit(0)


def test_run_outcomes_when_a_rank_exits_before_it_returns_then_it_is_not_good() -> None:
    (outcome,) = run_outcomes(1, exit_too_early, init=False)
    assert outcome.exit_code == 0 and not outcome.is_good
    assert "exited with code 0 before it returned" in outcome.story()
