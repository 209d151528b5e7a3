"""Is one verdict given on every surviving host, whatever happens to a rank, a host or the network between?"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import Hosts
from support.command import Command
from support.processes import children_of

MakeHosts = Callable[[int], Hosts]

TRAIN = """
import sys, os, time
sys.path.insert(0, {scripts!r})
from job import RANK, start, train

def tell(step, model):
    if step == 20:
        open(f"pid-{{RANK}}", "w").write(str(os.getpid()))
    if RANK == 1 and step > 20 and os.path.exists("sleep"):
        time.sleep(1000)
    if RANK == 1 and step > 20 and os.path.exists("crash"):
        __import__("ctypes").string_at(0)
    if RANK == 0 and step > 20 and os.path.exists("woken"):
        open("went-on", "w").close()

start()
train(tell, epochs=100000)
"""
SCRIPTS = str(Path(__file__).parents[1] / "faults" / "scripts")


@pytest.fixture
def job(make_hosts: MakeHosts, tmp_path: Path) -> tuple[Hosts, list[Command]]:
    """Two hosts with a rank each, training."""
    return started(make_hosts, tmp_path, 1)


def started(make_hosts: MakeHosts, tmp_path: Path, nproc: int) -> tuple[Hosts, list[Command]]:
    """Two hosts with that many ranks each, training."""
    hosts = make_hosts(2)
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(scripts=SCRIPTS))
    commands = [
        hosts.start(
            hosts.names[n], "allranks", "run", "--nnodes", "2", "--node-rank", str(n),
            "--master-addr", hosts.address(1), "--master-port", "29500", "--nproc", str(nproc), script,
            env={"OMP_NUM_THREADS": "1", "ALLRANKS_HOME": str(tmp_path / f"home{n}")},
        )
        for n in range(2)
    ]  # fmt: skip
    deadline = time.monotonic() + 45 * nproc
    while not all((tmp_path / f"pid-{rank}").exists() for rank in range(1, 2 * nproc)):
        assert time.monotonic() < deadline, commands[0].err + commands[1].err
        time.sleep(0.05)
    return hosts, commands


def rank_of(command: Command, local_rank: int = 0) -> int:
    """The process of one of a node's ranks, in this namespace's numbers."""
    (agent,) = children_of(command.process.pid)
    found = [p for p in children_of(agent) if b"train.py" in Path(f"/proc/{p}/cmdline").read_bytes()]
    told = f"LOCAL_RANK={local_rank}".encode()
    (pid,) = [p for p in found if told in Path(f"/proc/{p}/environ").read_bytes().split(b"\0")]
    return pid


def verdict(command: Command, code: str, timeout_s: float = 12) -> list[str]:
    """The lines of the verdict as this node printed it."""
    command.wait_for(f"{code} ", timeout_s)
    command.wait_for(f"explain {code}", timeout_s)
    lines = command.err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{code} "))
    last = next(i for i, line in enumerate(lines) if line.endswith(f"explain {code}") and i > first)
    return lines[first : last + 1]


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGSTOP, "AR221"), (signal.SIGKILL, "AR201")])
def test_rank_when_stopped_or_killed_on_one_host_then_both_say_the_same(
    job: tuple[Hosts, list[Command]], sig: signal.Signals, code: str
) -> None:
    hosts, commands = job
    os.kill(rank_of(commands[1]), sig)
    told = [verdict(c, code) for c in commands]
    assert f"rank 1 on {hosts.names[1]}" in told[0][0]
    assert told[0] == told[1]


@pytest.mark.timeout(240)  # torch starts four times: 25 s and more where other work shares the cores
def test_rank_when_it_alone_of_two_on_its_host_is_stopped_then_both_name_it_and_it_can_be_woken(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts, commands = started(make_hosts, tmp_path, 2)
    pid = rank_of(commands[1], 1)
    os.kill(pid, signal.SIGSTOP)
    told = [verdict(c, "AR221", timeout_s=30) for c in commands]
    assert told[0] == told[1]
    assert f"rank 3 on {hosts.names[1]} is stopped" in told[0][0]
    assert not re.search(r"rank [012] on \S+ (is|are) stopped", told[0][0])
    (tmp_path / "woken").touch()  # rank 0 waits in a step: it sees this only in the next one
    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while not (tmp_path / "went-on").exists():
        assert time.monotonic() < deadline, commands[0].err + commands[1].err
        time.sleep(0.05)


def test_rank_when_it_sleeps_on_the_other_host_then_its_line_is_named_on_both(
    job: tuple[Hosts, list[Command]], tmp_path: Path
) -> None:
    hosts, commands = job
    (tmp_path / "sleep").touch()
    told = [verdict(c, "AR226") for c in commands]
    assert told[0] == told[1]
    assert f"rank 1 on {hosts.names[1]} sleeps" in told[0][0]
    assert "train.py:10" in "\n".join(told[0])


def test_rank_when_it_crashes_on_the_other_host_then_its_line_comes_along(
    job: tuple[Hosts, list[Command]], tmp_path: Path
) -> None:
    hosts, commands = job
    (tmp_path / "crash").touch()
    told = [verdict(c, "AR204") for c in commands]
    assert told[0] == told[1]
    assert f"rank 1 on {hosts.names[1]}" in told[0][0]
    assert "train.py:12" in "\n".join(told[0])  # known on its own node only, by the stacks of its crash


@pytest.mark.parametrize("how", ["cut", "blackhole", "poweroff"])
def test_host_when_it_falls_silent_then_the_other_names_it_and_itself_the_cut(
    job: tuple[Hosts, list[Command]], how: str
) -> None:
    hosts, (first, second) = job
    hosts.do(how, hosts.names[1])
    # A host that loses power takes its side of the connection along only in a namespace: there the kernel lives on.
    first.wait_for("explain AR32", 12)
    (head, *_) = verdict(first, "AR320" if "AR320" in first.err or how != "poweroff" else "AR321")
    assert hosts.names[1] in head and "rank 1" in head
    if how != "poweroff":
        cut_off = verdict(second, "AR322")
        assert hosts.names[0] in cut_off[0]
        assert any(f"from {hosts.names[1]}" in line for line in cut_off)


def test_agent_when_killed_then_the_other_node_names_it(job: tuple[Hosts, list[Command]]) -> None:
    hosts, (first, second) = job
    hosts.send(second, signal.SIGKILL)
    (head, *_) = verdict(first, "AR321")
    assert hosts.names[1] in head


AGENTS_ONLY = """
table inet agents_only {
  chain in { type filter hook input priority 0; iif lo accept; tcp sport 29500 accept; tcp dport 29500 accept; meta l4proto tcp drop; }
}
"""
"""What a firewall does that lets the launcher's port through and nothing else; both ways, if both hosts have it."""


def test_path_of_the_data_when_it_breaks_beside_that_of_the_agents_then_it_is_named_on_both(
    job: tuple[Hosts, list[Command]],
) -> None:
    hosts, commands = job
    for name in hosts.names:
        rule = ["ip", "netns", "exec", name, "nft", "-f", "-"]
        subprocess.run(rule, input=AGENTS_ONLY, text=True, check=True, timeout=20)
    told = [verdict(c, "AR323", timeout_s=30) for c in commands]
    assert told[0] == told[1]
    assert re.search(rf"{hosts.address(1)}|{hosts.address(2)}", told[0][0])
    assert any(
        re.search(r"rank \d -> .*: \d+ bytes unacknowledged, \d+ retransmissions", line) for line in told[0]
    )
