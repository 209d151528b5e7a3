"""Is nothing lost when a host goes? Let go and trained on without, taken in when it comes back, or waited for: to the same bits."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import elastic_job, resume_job, soak
from support.cluster import Hosts, process_of_rank
from support.command import Command, Done
from support.ranks import run_ranks
from support.soak import NUM_UPDATES, SAVE_STEPS, SEED, Reference

MakeHosts = Callable[[int], Hosts]
pytestmark = pytest.mark.timeout(240)
SUPPORT = Path(__file__).parents[1] / "support"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
# A host that dies is silent, and busy kernels are silent too: not here, where a machine has two cores for all hosts.
HOST_MOMENTS = max(1, soak.MOMENTS // 20)


def node(hosts: Hosts, number: int, nodes: str, folder: Path, *words: object, node_rank: int) -> Command:
    meeting = ("--master-addr", hosts.address(1), "--master-port", "29500", "--node-rank", str(node_rank))
    options = ("--nproc", "1", "--max-restarts", "9", "--rdzv-conf", "last_call_timeout=30")
    return hosts.start(
        hosts.names[number], "allranks", "run", "--nnodes", nodes, *meeting, *options,
        "--run-dir", folder / "run", *map(str, words), env=ENV,
    )  # fmt: skip


def wait_until(condition: Callable[[], object], commands: list[Command], timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        told = "\n".join(f"{c.out}\n{c.err}" for c in commands)
        assert time.monotonic() < deadline, f"it did not come\n{told}"
        time.sleep(0.02)


def ended_well(commands: list[Command]) -> list[Done]:
    done = [command.finish(100) for command in commands]
    assert [d.code for d in done] == [0] * len(done), "\n".join(d.story() for d in done)
    return done


def test_elastic_job_when_a_host_dies_and_another_comes_then_the_global_batches_go_on(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "job"
    for place in (whole, folder):
        place.mkdir()
    run_ranks(2, elastic_job.train, str(whole), 5, 1000, init=False)
    hosts = make_hosts(3)
    words = (SUPPORT / "elastic_job.py", folder, 5, 7, 24, 53)
    first = node(hosts, 0, "1:2", folder, *words, node_rank=0)
    second = node(hosts, 1, "1:2", folder, *words, node_rank=1)
    wait_until(lambda: all((folder / f"gate-0-{r}").exists() for r in (0, 1)), [first, second])
    wait_until(lambda: (folder / "run" / "checkpoints" / "step-00000021").exists(), [first])
    hosts.do("poweroff", hosts.names[1])
    wait_until(lambda: (folder / "gate-1-0").exists(), [first, second])
    third = node(hosts, 2, "1:2", folder, *words, node_rank=1)
    third.wait_for("taken in at the next restart", 60)
    wait_until(lambda: (folder / "run" / "checkpoints" / "step-00000049").exists(), [first])
    os.kill(process_of_rank(first, "elastic_job.py"), signal.SIGKILL)
    ended_well([first, third])
    second.kill_all()
    assert [(folder / f"end-{rank}").read_text() for rank in (0, 1)] == ["2 100"] * 2
    starts, (expected,) = elastic_job.seen(folder), elastic_job.seen(whole)
    assert [min(update for _, update in start) for start in starts] == [1, 22, 50], (
        "each went on where it was"
    )
    assert all(start[key] == expected[key] for start in starts for key in start)
    assert {key: value for start in starts for key, value in start.items()} == expected
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 101)), "each update is logged once"


@pytest.mark.timeout(240 + 60 * HOST_MOMENTS)
def test_job_when_a_host_is_killed_at_a_random_moment_and_comes_back_then_it_ends_bit_for_bit_the_same(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    rng, whole_folder = random.Random(SEED + 2), tmp_path / "whole"
    run_ranks(2, resume_job.train, str(whole_folder), NUM_UPDATES, SAVE_STEPS, None, init=False)
    whole = Reference(whole_folder)
    hosts, number = make_hosts(2), 0
    for job in itertools.count():  # a job that ended before its host was killed is no moment
        if number == HOST_MOMENTS:
            break
        folder = tmp_path / f"job{job}"
        folder.mkdir()
        begun = time.monotonic()
        # Every second time the one where the nodes meet: then nobody is left to wait, and all are started again.
        was_killed, differs = kill_a_host(hosts, number % 2 ^ 1, folder, rng, whole)
        differs = differs or whole.differs(folder)
        if was_killed:
            number += 1
            soak.log("a host", str(NUM_UPDATES), differs, time.monotonic() - begun)
        assert soak.is_complete(folder) and not differs, f"seed {SEED}: {differs}"
        shutil.rmtree(folder)


def kill_a_host(
    hosts: Hosts, dead: int, folder: Path, rng: random.Random, whole: Reference
) -> tuple[bool, str]:
    """Run a job to its end, a host of which dies and comes back; whether it died before the end, and what differed then."""
    words = (SUPPORT / "resume_job.py", folder, NUM_UPDATES, SAVE_STEPS)
    commands = [node(hosts, n, "2", folder, *words, node_rank=n) for n in (0, 1)]
    soak.wait_for_moment(folder, rng, (), lambda: commands[0].process.poll() is not None, 3.0)
    hosts.do("poweroff", hosts.names[dead])
    commands[dead].finish(20)
    differs = whole.differs(folder)
    if dead == 0 or soak.is_complete(folder):
        commands[1 - dead].finish(60)
    hosts.do("poweron", hosts.names[dead])
    if soak.is_complete(folder):
        return False, differs
    for n in [dead] if dead == 1 else [0, 1]:
        commands[n] = node(hosts, n, "2", folder, *words, node_rank=n)
    ended_well(commands)
    return True, differs
