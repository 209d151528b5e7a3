"""Does parity name the cause? Each broken script is recorded on one rank and on two, and each near-miss must be equal.

The scripts run in ranks that have torch loaded already; tests/e2e/test_parity.py runs the command itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from allranks.parity.compare import TOLERANCES
from allranks.parity.options import RecordOptions
from allranks.parity.recording import read
from allranks.parity.runner import Answer, judge
from allranks.parity.startup import begin_in_process
from support.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

SCRIPTS = Path(__file__).resolve().parents[1] / "fixtures" / "parity"


def record(script: str, args: tuple[str, ...], folder: str, options: dict[str, Any]) -> None:
    """Run a script in this rank, recorded."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    begin_in_process(Path(folder), RecordOptions(**options), rank, world_size)
    sys.argv = [script, *args]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code
        os._exit(0)  # enough updates: as a rank of a real job, so that one that still waits for it is told
    except RuntimeError as error:  # a rank of a broken script may lose the others; what was recorded counts
        print(f"the script failed: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parity(tmp_path: Path, script: str, *args: str, num_ranks: int = 2, **options: Any) -> Answer:
    """What parity says of a script."""
    options = {"updates": 6, **options}
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    path = str(SCRIPTS / script)
    run_ranks(num_ranks, record, path, args, str(many), options, init=False, may_die=range(num_ranks))
    options |= {"loaders": read(many).ranks[0].loaders, "scale": num_ranks}
    run_ranks(1, record, path, args, str(one), options, init=False, may_die=[0])
    return judge(read(one), read(many))


CAUSES = {
    "AR701": ("AR701", "update 5 sees samples", "more often than on one rank"),
    "AR701-undivided": ("AR701", "update 1 sees samples", "more often"),
    "AR702": ("AR702", "update 1 sees 16 samples on 2 ranks and 8 on one"),
    "AR703": ("AR703", "update 1 sees 16 samples as on one rank, but other ones"),
    "AR704": ("AR704", "the initial weights on 2 ranks are not those on one: first.weight"),
    "AR705": ("AR705", "15 of 16 samples have another content"),
    "AR706": ("AR706", "dropout is on (drop)"),
    "AR707": ("AR707", "norm (BatchNorm1d) is the first layer"),
    "AR708": ("AR708", "every gradient is 1/2 times"),
    "AR709": ("AR709", "all layers give the same outputs, but the loss is"),
    "AR709-uneven": ("AR709", "micro-batches of [10], [6] samples"),
    "AR710": ("AR710", "2 of 4 parameters differ between ranks after update 1: first.weight, first.bias"),
    "AR710-inner": ("AR710", "4 of 4 parameters differ between ranks after update 1"),
    "AR711": ("AR711", "the learning rate is 0.2 on 2 ranks and 0.1 on one"),
    "AR712": ("AR712", "rank 1 went backward 2 times for update 2"),
    "AR713": ("AR713", "buffer seen differ"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_broken_script_when_compared_then_the_cause_is_named(tmp_path: Path, name: str) -> None:
    code, *words = CAUSES[name]
    answer = parity(tmp_path, "plain_ddp.py", "--break", name)
    assert answer.finding is not None, "nothing found"
    assert answer.finding.code == code, answer.finding
    assert all(word in answer.finding.what for word in words), answer.finding


NEAR_MISSES = ("AR702", "AR704", "AR705", "AR707", "AR709", "AR709-uneven", "AR710", "AR712", "AR713")


@pytest.mark.parametrize("name", ["none", *NEAR_MISSES])
def test_near_miss_when_compared_then_equal(tmp_path: Path, name: str) -> None:
    answer = parity(tmp_path, "plain_ddp.py", "--near", name)
    assert answer.finding is None, answer.finding
    assert answer.result.equal_updates == 6


def test_dropout_when_switched_off_then_the_rest_is_equal(tmp_path: Path) -> None:
    answer = parity(tmp_path, "plain_ddp.py", "--break", "AR706", dropout=False)
    assert answer.finding is None, answer.finding


@pytest.mark.parametrize(("autocast", "kind"), [(True, "half"), (False, "float32")])
def test_half_precision_when_switched_off_then_compared_as_float32(
    tmp_path: Path, autocast: bool, kind: str
) -> None:
    answer = parity(tmp_path, "plain_ddp.py", "--half", autocast=autocast)
    assert answer.finding is None, answer.finding
    assert answer.result.tolerance == TOLERANCES[kind]
    assert answer.result.largest_gradient.size < 1e-5 or autocast


@pytest.mark.parametrize(
    ("num_ranks", "args"),
    [(2, ()), (3, ("--weighted",)), (2, ("--batch-norm", "sync"))],
    ids=["mean", "weighted", "sync"],
)
def test_allranks_script_when_compared_then_equal(
    tmp_path: Path, num_ranks: int, args: tuple[str, ...]
) -> None:
    answer = parity(tmp_path, "with_allranks.py", *args, num_ranks=num_ranks, updates=8)
    assert answer.finding is None, answer.finding
    assert answer.result.equal_updates == 8
    assert answer.one.ranks[0].uses_library and answer.one.ranks[0].passes


@pytest.mark.parametrize(
    ("args", "code"),
    [(("--batch-norm", "local"), "AR707"), (("--dropout", "0.5"), "AR706")],
    ids=["AR707", "AR706"],
)
def test_allranks_script_when_layers_depend_on_the_rank_then_said(
    tmp_path: Path, args: tuple[str, ...], code: str
) -> None:
    answer = parity(tmp_path, "with_allranks.py", *args)
    assert answer.finding is not None and answer.finding.code == code, answer.finding
