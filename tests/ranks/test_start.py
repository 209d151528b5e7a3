"""What does start() give a script: its place in words, seeds, a run directory that all agree on, lines from rank 0 only?"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import allranks
from allranks.core.errors import AllranksError, StartError, UsageError
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks


# -- alone -------------------------------------------------------------------------------------------------------------------


def alone() -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name)
    with allranks.start() as run:
        with run.rank_zero_first() as is_first:
            pass
        run.barrier()
        found = {
            "place": (run.rank, run.world_size, run.is_rank_zero, run.place.launcher),
            "device": run.device,
            "values": (
                run.sum([1, 2]),
                run.mean(3.0),
                run.gather([4]),
                run.any(0),
                run.all(1),
                run.agree("x"),
            ),
            "first": is_first,
            "group": dist.is_initialized(),
        }
        run.log(loss=1.0)
        found["files"] = sorted(p.name for p in run.run_dir.iterdir())
    return found


def test_start_when_alone_then_a_world_of_one_without_a_group() -> None:
    (found,) = run_ranks(1, alone, init=False)
    assert found["place"] == (0, 1, True, "alone")
    assert found["device"] == torch.device("cpu")
    assert found["values"] == (3, 3.0, [4], False, True, "x")
    assert found["first"] and not found["group"]
    assert "metrics.jsonl" in found["files"]


def start_twice() -> tuple[str, str]:
    with allranks.start() as run, pytest.raises(StartError) as caught, allranks.start():
        pass
    with allranks.start() as again:  # the failed one left nothing in the way
        return caught.value.code, f"{run.rank}{again.rank}"


def test_start_when_inside_a_run_then_an_error_and_the_first_goes_on() -> None:
    assert run_ranks(2, start_twice, init=False) == [("AR007", "00"), ("AR007", "11")]


# -- settings ----------------------------------------------------------------------------------------------------------------


def problem_of(settings: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(AllranksError) as caught, allranks.start(**settings):
        pass
    return caught.value.code, caught.value.what


SETTINGS = [
    ({"precision": "fp8"}, ("AR104", "precision='fp8'")),
    ({"seed": None}, ("AR104", "seed=None")),
    ({"timeout_s": 0}, ("AR104", "timeout_s=0")),
    ({"start_timeout_s": -1}, ("AR104", "start_timeout_s=-1")),
    ({"threads": 0}, ("AR104", "threads=0")),
    ({"global_batch_size": 0}, ("AR130", "global_batch_size=0")),
    ({"global_batch_size": 2.5}, ("AR130", "global_batch_size=2.5")),
    (
        {"accumulation_steps": 2, "micro_batch_size": 4},
        ("AR130", "accumulation_steps=2 and micro_batch_size=4: each follows from the other"),
    ),
    (
        {"device": "cuda"},
        ("AR005", f"device='cuda' was asked for, but torch {torch.__version__} sees no GPU"),
    ),
    ({"sinks": (print,)}, ("AR162", "sinks=(<built-in function print>): it has no log and no close")),
]


def problems() -> list[tuple[str, str]]:
    return [problem_of(settings) for settings, _ in SETTINGS]


def test_start_when_a_setting_cannot_be_then_said_before_anybody_waits() -> None:
    # On one of two ranks: it must not wait for the other.
    outcomes = run_outcomes(1, problems, init=False, env={"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert outcomes[0].result == [expected for _, expected in SETTINGS], outcomes[0].story()


# -- seeds -------------------------------------------------------------------------------------------------------------------


def streams(seed: int) -> dict[str, list[float]]:
    import random

    import numpy as np

    with allranks.start(seed=seed) as run:
        weights = nn.Linear(3, 1).weight.flatten().tolist()
        alike = [random.random(), float(np.random.rand()), *torch.rand(2).tolist()]
        next(run.epochs(1))  # training begins
        dropped = nn.functional.dropout(torch.ones(64)).tolist()
        own = [random.random(), float(np.random.rand()), *torch.rand(2).tolist()]
    return {"weights": weights, "alike": alike, "dropped": dropped, "own": own}


def test_seed_then_weights_are_alike_everywhere_and_dropout_differs_on_every_rank() -> None:
    by_size = {size: run_ranks(size, streams, 3, init=False) for size in (1, 3)}
    every = [*by_size[1], *by_size[3]]
    assert all(
        found["weights"] == every[0]["weights"] and found["alike"] == every[0]["alike"] for found in every
    )
    first, second, third = by_size[3]
    for name in ("dropped", "own"):
        assert first[name] != second[name] != third[name] != first[name]
    assert by_size[1][0]["own"] == first["own"]  # rank 0 has the stream of one device
    (other,) = run_ranks(1, streams, 4, init=False)
    assert other["weights"] != every[0]["weights"] and other["own"] != every[0]["own"]


# -- the run directory -------------------------------------------------------------------------------------------------------


def run_dir_of(named: list[str | None]) -> str:
    sys.argv[0] = "/somewhere/train me.py"
    with allranks.start(named[int(os.environ["RANK"])]) as run:
        run.log(loss=run.rank)
        run.barrier()
        lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["loss"] for line in lines] == [0]  # rank 0 alone writes
        return str(run.run_dir)


def test_run_dir_when_not_named_then_the_scripts_name_and_time_alike_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, run_dir_of, [None, None], init=False, cwd=tmp_path)
    assert first == second
    assert Path(first).parent == tmp_path / "runs" and Path(first).name.startswith("train me-20")


def test_run_dir_when_ranks_name_different_ones_then_rank_0s(tmp_path: Path) -> None:
    found = run_ranks(2, run_dir_of, ["here", "there"], init=False, cwd=tmp_path)
    assert found == [str(tmp_path / "here")] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_run_dir_when_the_launcher_made_one_then_that(tmp_path: Path) -> None:
    env = {"ALLRANKS_RUN_DIR": str(tmp_path / "given"), "ALLRANKS_HOME": str(tmp_path / "home")}
    assert run_ranks(2, run_dir_of, [None, None], init=False, env=env) == [str(tmp_path / "given")] * 2


def test_run_dir_when_home_is_set_then_below_it(tmp_path: Path) -> None:
    env = {"ALLRANKS_HOME": str(tmp_path / "my runs")}
    first, _ = run_ranks(2, run_dir_of, [None, None], init=False, env=env)
    assert Path(first).parent == tmp_path / "my runs"


def log_nothing() -> bool:
    with allranks.start("quiet") as run:
        run.sum(1)
    return Path("quiet").exists()


def test_run_dir_when_nothing_is_written_then_not_even_made() -> None:
    assert run_ranks(1, log_nothing, init=False) == [False]


# -- what is said ------------------------------------------------------------------------------------------------------------


def talk() -> None:
    with allranks.start("named") as run:
        run.print("printed once", run.world_size)
        logging.getLogger("allranks.x").info("for rank 0")
        logging.getLogger("allranks.x").warning("from each")
    logging.getLogger("allranks.x").warning("after the run: to nobody")
    assert logging.getLogger("allranks").handlers == []


def test_start_then_rank_0_says_once_where_it_is_and_why(tmp_path: Path) -> None:
    first, second = run_outcomes(2, talk, init=False, cwd=tmp_path)
    assert first.is_good and second.is_good, first.story() + second.story()
    host = os.uname().nodename
    lines = first.output.splitlines()
    assert lines[0] == (
        f"allranks [rank 0/2 {host}] rank 0 of 2 (local rank 0 of 2, node 0 of 1) on host {host}, started by torchrun: "
        "RANK and WORLD_SIZE are set"
    )
    assert lines[1].startswith(f"allranks [rank 0/2 {host}] device cpu, ")
    assert "intra-op thread" in lines[1] and lines[1].endswith(f"run directory {tmp_path / 'named'}")
    assert "printed once 2" in lines and any(line.endswith("for rank 0") for line in lines)
    assert "printed once" not in second.output and "for rank 0" not in second.output
    assert "from each" in second.output


def users_logging() -> list[int]:
    logging.basicConfig(level=logging.WARNING)
    with allranks.start():
        return [len(logging.getLogger("allranks").handlers), logging.getLogger("allranks").level]


def test_start_when_the_user_has_set_up_logging_then_it_is_left_alone() -> None:
    (outcome,) = run_outcomes(1, users_logging, init=False)
    assert outcome.result == [0, 0] and "started by" not in outcome.output, outcome.output


# -- trackers ----------------------------------------------------------------------------------------------------------------


class Tracker:
    """Writes down what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[Any] = []
        self.fails = fails

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self.calls.append((dict(values), step))

    def close(self) -> None:
        self.calls.append("close")
        if self.fails:
            raise OSError("no network")


def track(fails_in_the_loop: bool) -> list[Any]:
    tracker = Tracker()
    try:
        with allranks.start("r", sinks=(tracker,), tensorboard=False) as run:
            run.log({"loss/train": torch.tensor(0.5)}, step=7, lr=0.1)
            run.log(loss=1)
            if fails_in_the_loop:
                raise ValueError("in the loop")
    except ValueError:
        pass
    return tracker.calls


@pytest.mark.parametrize("fails_in_the_loop", [False, True])
def test_tracker_then_rank_0s_is_told_everything_and_closed_once(fails_in_the_loop: bool) -> None:
    first, second = run_ranks(2, track, fails_in_the_loop, init=False)
    assert first == [({"loss/train": 0.5, "lr": 0.1}, 7), ({"loss": 1}, 0), "close"]
    assert second == []


def close_trackers() -> tuple[list[Any], list[Any], str, bool]:
    bad, good, unused = Tracker(fails=True), Tracker(), Tracker()
    with pytest.raises(OSError) as caught, allranks.start("r", sinks=(good, bad), tensorboard=False) as run:
        run.log(loss=1)
    with allranks.start("r", sinks=(unused,)):
        pass
    return good.calls[-1:], unused.calls, str(caught.value), dist.is_initialized()


def test_tracker_when_one_cannot_close_then_the_others_are_and_the_error_is_raised() -> None:
    (found,) = run_ranks(1, close_trackers, init=False)
    assert found == (["close"], ["close"], "no network", False)


def log_wrongly() -> str:
    with allranks.start("r", tensorboard=False) as run, pytest.raises(UsageError) as caught:
        run.log(loss=object())
    return caught.value.what


def test_log_when_a_value_cannot_be_written_then_named() -> None:
    assert run_ranks(1, log_wrongly, init=False) == ["log(loss=...) got a value of type object"]
