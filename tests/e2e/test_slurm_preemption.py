"""Does a job under a real Slurm save when it is warned, go on after it was queued again, and outlive the death of a node?"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import elastic_job
from support.by_hand import free_port
from support.command import RunCommand, command_path
from support.needs import need, need_commands
from support.processes import kill, variable_holders
from support.slurm import slurm

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
JOB = SUPPORT / "resume_job.py"
LAUNCHER = f"{command_path('allranks')} run --run-dir run"
ENDLESS = 1_200_000
ASKS_FOR_THE_END = """
import os, time
from allranks.run.options import parse
from allranks.run.preempt import ScheduledStop
stop = ScheduledStop(parse(["--stop-before", "30s", "train.py"], {}), os.environ, print)
while stop.is_asking and not stop.strikes(0.0):
    time.sleep(0.1)
print("stops after", stop.at - time.time(), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """A Slurm of two nodes."""
    need("a Slurm of our own needs root", os.geteuid() == 0)
    need_commands("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel", "munged", "runuser")
    with slurm(num_nodes=2) as env:
        yield env


@pytest.fixture
def submit(
    run_command: RunCommand, cluster: dict[str, str], tmp_path: Path
) -> Iterator[Callable[[str], str]]:
    """Submit a batch script; the id of its job, which is cancelled with the test."""
    ids: list[str] = []

    def submitted(script: str) -> str:
        (tmp_path / "job.sh").write_text(script)
        done = run_command("sbatch", "--parsable", tmp_path / "job.sh", env=cluster)
        assert done.code == 0, done.story()
        ids.append(done.out.strip())
        return ids[-1]

    yield submitted
    for job in ids:
        run_command("scancel", "--signal=KILL", job, env=cluster)
        run_command("scancel", job, env=cluster)


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    try:
        lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["event"] == kind]


def wait_until(condition: Callable[[], object], what: str, folder: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        said = "".join(path.read_text() for path in folder.glob("out*.txt"))
        assert time.monotonic() < deadline, f"{what} did not come\n{said}"
        time.sleep(0.1)


def test_job_when_slurm_warns_it_then_it_saves_is_queued_again_and_goes_on(
    submit: Callable[[str], str], tmp_path: Path
) -> None:
    # Of the minute, so that the warning comes as soon as the ranks have been started: --signal is up to 60 s early.
    submit(
        "#!/bin/bash\n#SBATCH --ntasks=1 --cpus-per-task=2 --time=2 --signal=B:USR1@60 --requeue --open-mode=append --output=out.txt\n"
        f"'{sys.executable}' -c '{ASKS_FOR_THE_END}'\n"
        "export OMP_NUM_THREADS=1\n"
        f"updates={ENDLESS}\n"
        'if [ -n "$SLURM_RESTART_COUNT" ]; then\n'
        "    scontrol update JobId=$SLURM_JOB_ID TimeLimit=60\n"  # no warning this time
        "    updates=$(cat updates)\n"
        "fi\n"
        f"exec {LAUNCHER} --nproc 2 --requeue {JOB} . $updates 100000\n"
    )
    wait_until(lambda: events(tmp_path, "checkpoint"), "a checkpoint", tmp_path)
    (first,) = events(tmp_path, "checkpoint")
    saved = int(str(first["step"]))
    (tmp_path / "updates").write_text(str((saved // 12 + 2) * 12))  # whole epochs, of which two are left
    wait_until(lambda: len(events(tmp_path, "start")) == 2, "the second start", tmp_path)
    wait_until(lambda: (tmp_path / "rank1.json").exists(), "the end", tmp_path)
    said = (tmp_path / "out.txt").read_text()
    stops_after = float(said.split("stops after ")[1].split()[0])
    assert 60 < stops_after < 91, "of two minutes, 30 s before the end"
    assert "stopped after update" in said and "Slurm is asked to queue job" in said, said
    assert [row["step"] for row in events(tmp_path, "resume")] == [saved], said
    assert "SIGUSR1" in str(events(tmp_path, "stop")[0]["reason"])
    for rank in range(2):
        end = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert end["rows"] == end["updates"] == (saved // 12 + 2) * 12, "every update was done once"


def test_job_when_a_node_dies_then_training_goes_on_on_the_other(
    submit: Callable[[str], str], run_command: RunCommand, cluster: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    submit(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 --no-kill --output=out.txt\n"
        "export OMP_NUM_THREADS=1\n"
        "srun --no-kill --kill-on-bad-exit=0 --output=out-%n.txt bash -c '"
        f"exec {LAUNCHER} --nnodes 1:2 --node-rank $SLURM_NODEID --master-addr 127.0.0.1 --master-port {port}"
        f" --rdzv-conf last_call_timeout=60 --max-restarts 3 {SUPPORT / 'elastic_job.py'} . 4 7 24'\n"
    )
    wait_until(lambda: all((tmp_path / f"gate-0-{r}").exists() for r in (0, 1)), "update 24", tmp_path)
    wait_until(lambda: len(events(tmp_path, "checkpoint")) == 3, "checkpoints", tmp_path)
    for pid in variable_holders("SLURMD_NODENAME", "n2"):
        kill(pid)
    run_command("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test", env=cluster)
    wait_until(lambda: (tmp_path / "end-0").exists(), "the end", tmp_path)
    assert (tmp_path / "end-0").read_text() == "1 80"
    before, after = elastic_job.seen(tmp_path)
    assert min(update for _, update in after) == 22, "what was not saved is done again"
    assert all(after[key] == before[key] for key in before.keys() & after.keys())
    for epoch in range(4):
        batches = [value for (e, _), value in {**before, **after}.items() if e == epoch]
        assert sorted(i for batch in batches for i in batch) == list(range(elastic_job.SAMPLES))
    assert events(tmp_path, "node-lost") and "AR32" in (tmp_path / "out-0.txt").read_text()
