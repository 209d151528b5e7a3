"""Does start() find its place under a real Slurm: srun inside a job, the batch script itself, tasks on two nodes?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import RunCommand
from support.needs import need, need_commands
from support.slurm import slurm

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(180)]

SCRIPT = """
import os
import allranks

os.environ["MASTER_ADDR"] = "127.0.0.1"  # the nodes' names n1, n2 are Slurm's only
with allranks.start() as run:
    places = run.gather([(run.place.node_rank, run.place.local_rank, run.place.local_world_size, run.place.num_nodes)])
    run.print(run.world_size, "ranks by", run.place.launcher, *places, run.sum(run.rank + 1))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A Slurm of two nodes."""
    need("a Slurm of our own needs root", os.geteuid() == 0)
    need_commands("slurmctld", "slurmd", "srun", "sbatch", "munged", "runuser")
    with slurm(num_nodes=2) as env:
        yield env


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_script_when_a_job_runs_it_then_ranks_as_srun_was_told_and_the_batch_script_is_alone(
    run_command: RunCommand, cluster: dict[str, str], script: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job.sh"
    job.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --output=out.txt\n"
        f"'{sys.executable}' '{script}'\n"
        f"srun '{sys.executable}' '{script}'\n"
        f"srun -N1 -n2 -c1 --ntasks-per-node=2 '{sys.executable}' '{script}'\n"
    )
    done = run_command("sbatch", "--wait", job, env=cluster, timeout_s=150)
    said = (tmp_path / "out.txt").read_text()
    assert done.code == 0, done.story() + said
    assert "1 ranks by alone (0, 0, 1, 1) 1" in said, said
    assert "inside a Slurm allocation, but not in a step started by srun" in said, said
    assert "2 ranks by Slurm (0, 0, 1, 2) (1, 0, 1, 2) 3" in said, said
    assert "2 ranks by Slurm (0, 0, 2, 1) (0, 1, 2, 1) 3" in said, said
