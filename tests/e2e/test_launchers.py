"""Does one script, unchanged, say the same under python, torchrun, allranks run, srun and mpirun?"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from support.command import Done, RunCommand, command_path
from support.needs import need_commands

# What it is about is what is said, not how soon: on a busy machine a start takes a minute.
PATIENCE_S = 180
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(PATIENCE_S + 20)]

SCRIPT = """
import torch
import allranks

with allranks.start("run", global_batch_size=6) as run:
    torch.manual_seed(1)
    model = run.model(torch.nn.Linear(2, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.ones(12, 1))
    for x, y in run.loader(data, train=True):
        run.step(torch.nn.functional.mse_loss(model(x), y))
    total = sum(p.sum().item() for p in model.parameters())
    samples = run.sum(len(data) if run.is_rank_zero else 0)
    run.print(f"weights {total:.5f} after {run.updates} updates and {samples} samples")
    run.print(f"{run.world_size} ranks by {run.place.launcher}")
"""
# Two weights and a bias after two updates, as one device has them.
LINE = re.compile(r"^weights (-?\d\.\d{5}) after 2 updates and 12 samples$", re.MULTILINE)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train me.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def expected() -> float:
    """The sum of the weights, by plain torch in this process."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(24.0).reshape(12, 2) / 24
    for x in data.split(6):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), torch.ones(6, 1)).backward()
        optimizer.step()
    return sum(p.sum().item() for p in model.parameters())


def check(done: Done, expected: float, world_size: int, launcher: str) -> None:
    """The line of one device, once, and who started it."""
    assert done.code == 0, done.story()
    found = LINE.findall(done.out)
    assert len(found) == 1 and float(found[0]) == pytest.approx(expected, abs=2e-5), done.story()
    assert f"{world_size} ranks by {launcher}" in done.out, done.story()


def test_script_when_run_by_python_then_a_world_of_one(
    run_command: RunCommand, script: Path, expected: float
) -> None:
    done = run_command(sys.executable, script, timeout_s=PATIENCE_S)
    check(done, expected, 1, "alone")
    assert "alone: no launcher's variables are set" in done.err, done.story()


def test_script_when_run_by_torchrun_then_the_same(
    run_command: RunCommand, script: Path, expected: float
) -> None:
    torchrun = (command_path("torchrun"), "--standalone", "--nproc-per-node", "2")
    done = run_command(*torchrun, script, timeout_s=PATIENCE_S)
    check(done, expected, 2, "torchrun")
    assert "started by torchrun: RANK and WORLD_SIZE are set" in done.err, done.story()


def test_script_when_run_by_our_own_then_the_same(
    allranks: RunCommand, script: Path, expected: float
) -> None:
    done = allranks("run", "--nproc", "2", script, timeout_s=PATIENCE_S)
    check(done, expected, 2, "allranks run")


def test_script_when_run_by_mpirun_then_the_same(
    run_command: RunCommand, script: Path, expected: float
) -> None:
    need_commands("mpirun")  # Debian: openmpi-bin
    more = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    mpirun = ("mpirun", *more, "--oversubscribe", "-np", "2")
    done = run_command(*mpirun, sys.executable, script, timeout_s=PATIENCE_S)
    check(done, expected, 2, "MPI")


FAKE_SRUN = r"""#!/bin/bash
# srun -n N command...: N tasks of a step on this host, with the variables that Slurm's own sets.
n=$2; shift 2
export SLURM_JOB_ID=$$ SLURM_STEP_ID=0 SLURM_NTASKS=$n SLURM_STEP_NUM_TASKS=$n SLURM_NNODES=1
export SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=$n SLURM_NODEID=0 SLURM_JOB_NODELIST=$(hostname) SLURM_STEP_NODELIST=localhost
pids=()
for ((i = 0; i < n; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!); done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""


@pytest.fixture
def srun(tmp_path: Path) -> Path:
    path = tmp_path / "srun"
    path.write_text(FAKE_SRUN)
    path.chmod(0o755)
    return path


def test_script_when_run_by_srun_then_the_same(
    run_command: RunCommand, script: Path, expected: float, srun: Path
) -> None:
    done = run_command(srun, "-n", "2", sys.executable, script, timeout_s=PATIENCE_S)
    check(done, expected, 2, "Slurm")
    assert re.search(r"SLURM_PROCID and SLURM_STEP_NUM_TASKS are set in step \d+\.0", done.err), done.story()


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    path = tmp_path / "fail.py"
    path.write_text(
        "import allranks\n"
        "with allranks.start() as run:\n"
        "    if run.rank == 1:\n"
        "        raise ValueError('no such label: 11')\n"
        "    for _ in range(1000): run.sum(1)\n"
    )
    return path


def test_script_when_a_task_of_srun_fails_then_every_task_tells_its_story(
    run_command: RunCommand, failing: Path, srun: Path
) -> None:
    done = run_command(srun, "-n", "2", sys.executable, failing, timeout_s=PATIENCE_S)
    assert done.code == 1
    story = f"AR020 rank 1 on host {os.uname().nodename} failed first: ValueError: no such label: 11"
    assert done.err.count(story) == 1, done.story()  # the error of rank 0
    assert f"{failing}:4 in <module>" in done.err, done.story()


def test_script_when_it_fails_under_our_own_then_the_launcher_tells_the_cause_and_not_the_consequence(
    allranks: RunCommand, failing: Path
) -> None:
    done = allranks("run", "--nproc", "2", failing, timeout_s=PATIENCE_S)
    assert done.code == 1
    assert "rank 1 on" in done.err and "raised ValueError: no such label: 11" in done.err, done.story()
    assert "AR020" not in done.err and "closed by peer" not in done.err, done.story()
