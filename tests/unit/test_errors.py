"""Does an error of ours say what, where, why and what to do, survive a pickle, and is a warning given once?"""

from __future__ import annotations

import os
import pickle
import socket
import warnings
from unittest import mock

import pytest

import allranks
from allranks.core import errors
from allranks.core.errors import (
    AllranksError,
    AllranksWarning,
    CheckpointError,
    CommError,
    RanksDisagree,
    ResultError,
    StartError,
    UsageError,
    warn_once,
)

EVERY = [StartError, UsageError, RanksDisagree, CommError, CheckpointError, ResultError]
RANK_NAMES = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE")


def test_text_then_what_where_why_fix_and_the_page() -> None:
    error = StartError(
        "AR101", "loss is 3", why="it is no tensor", fix="run.step(loss)", where="rank 1 of 2 on host a"
    )
    assert str(error) == (
        "AR101 loss is 3\n  where: rank 1 of 2 on host a\n  why:   it is no tensor\n  fix:   run.step(loss)\n"
        "  more:  allranks explain AR101"
    )


def test_text_when_why_and_fix_are_not_known_then_no_empty_lines() -> None:
    error = StartError("AR101", "loss is 3", where="here")
    assert str(error) == "AR101 loss is 3\n  where: here\n  more:  allranks explain AR101"


@pytest.mark.parametrize(
    ("env", "where"),
    [
        ({}, "host"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "rank 1 of 4 on host"),
        ({"RANK": "1"}, "host"),
        ({"SLURM_PROCID": "0"}, "host"),  # in the batch script
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, "rank 2 of 3 on host"),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, "rank 2 of 3 on host"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "rank 0 of 2 on host"),
    ],
)
def test_where_then_the_rank_under_every_launcher(env: dict[str, str], where: str) -> None:
    with mock.patch.dict(os.environ):
        for name in RANK_NAMES:
            os.environ.pop(name, None)
        os.environ.update(env)
        assert AllranksError("AR001", "x").where == f"{where} {socket.gethostname()}"


@pytest.mark.parametrize("kind", [AllranksError, *EVERY])
def test_error_when_it_travels_between_processes_then_nothing_is_lost(kind: type[AllranksError]) -> None:
    error = kind("AR101", "what", why="why", fix="fix", where="rank 1 of 2 on host a")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error)
    assert (copy.code, copy.what, copy.why, copy.fix, copy.where) == (
        "AR101",
        "what",
        "why",
        "fix",
        error.where,
    )


def test_errors_then_one_except_catches_them_all_and_a_wrong_value_is_a_value_error() -> None:
    assert all(issubclass(kind, allranks.AllranksError) for kind in EVERY)
    assert issubclass(UsageError, ValueError)


def test_warn_once_when_repeated_then_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_once("AR111", "all weights are 0")
        warn_once("AR111", "something else")
    assert [str(w.message) for w in caught] == ["AR111 all weights are 0", "AR111 something else"]
    assert {w.category for w in caught} == {AllranksWarning}
