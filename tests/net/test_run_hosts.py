"""Does `allranks run` bring several hosts together, and say what is wrong when it cannot or when one is lost?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from support.cluster import Hosts, process_of_rank
from support.command import Command, Done
from support.needs import need_commands

MakeHosts = Callable[[int], Hosts]

TRAINS = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 2))
for step in range(5):
    model(torch.ones(4, 8) * dist.get_rank()).sum().backward()
print("rank", dist.get_rank(), "of", dist.get_world_size(), "grad", round(model.module.weight.grad[0, 0].item(), 3), flush=True)
dist.destroy_process_group()
"""
WAITS = """
import os, sys, time
rank, attempt, world = (int(os.environ[n]) for n in ("RANK", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"))
print(f"ready {rank} of {world} attempt {attempt}", flush=True)
open(f"pid-{rank}-{attempt}", "w").write(str(os.getpid()))
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not os.path.exists("enough"): time.sleep(0.05)
"""
EXIT_MACHINE = 3


@pytest.fixture
def train(tmp_path: Path) -> Callable[[str], Path]:
    """Write the script."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def node(
    hosts: Hosts,
    number: int,
    *args: str | Path,
    nodes: str = "2",
    env: Mapping[str, str] | None = None,
    rank: int | None = None,
) -> Command:
    """Start the launcher of one node, static rendezvous at host 1."""
    meeting = ("--master-addr", hosts.address(1), "--master-port", "29500")
    numbered = ("--node-rank", str(number if rank is None else rank))
    return hosts.start(
        hosts.names[number], "allranks", "run", "--nnodes", nodes, *numbered, *meeting, *args, env=env
    )


def both(hosts: Hosts, *args: str | Path) -> list[Command]:
    return [node(hosts, number, *args) for number in range(2)]


def ended(commands: list[Command], timeout_s: float = 30) -> list[Done]:
    done = [c.finish(timeout_s) for c in commands]
    for one in done:
        assert not one.timed_out, "\n".join(d.story() for d in done)
        assert not one.left_behind, one.story()
    return done


def wait_for_file(path: Path, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.timeout(150)  # torch starts on both hosts: 25 s where other work shares the cores
def test_two_hosts_when_the_name_resolves_to_loopback_at_home_then_gloo_trains_all_the_same(
    make_hosts: MakeHosts, train: Callable[[str], Path]
) -> None:
    hosts = make_hosts(2)
    first = hosts.names[0]
    file = Path(f"/etc/netns/{first}/hosts")  # as Debian writes it
    file.write_text(file.read_text().replace(f"{hosts.address(1)} {first}", f"127.0.1.1 {first}"))
    endpoint = (
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{first}:29500",
        "--nproc",
        "1",
        "--nnodes",
        "2",
    )
    started = [
        hosts.start(h, "ip", "netns", "exec", h, *_allranks(), *endpoint, train(TRAINS)) for h in hosts.names
    ]
    done = ended(started, 60)
    assert [d.code for d in done] == [0, 0], "\n".join(d.story() for d in done)


def _allranks() -> tuple[str, str]:
    from support.command import command_path

    return str(command_path("allranks")), "run"


def test_waiting_when_a_node_is_missing_then_each_side_says_who(
    make_hosts: MakeHosts, train: Callable[[str], Path]
) -> None:
    hosts = make_hosts(2)
    script = train(WAITS)
    second = node(hosts, 1, "--nproc", "2", script, "0")
    second.wait_for("waiting for node 0 at", 20)
    second.wait_for("refuses the connection", 1)
    first = node(hosts, 0, "--nproc", "2", script, "0")
    done = ended([first, second])
    assert [d.code for d in done] == [0, 0]
    alone = node(hosts, 0, "--nproc", "2", "--rdzv-conf", "join_timeout=5", script, "0")
    alone.wait_for("waiting for", 20)
    alone.wait_for("node 1 (rank 2 and rank 3)", 1)
    (done_alone,) = ended([alone])
    assert done_alone.code == EXIT_MACHINE
    assert "AR310 only 1 of 2 nodes came" in done_alone.err


def test_meeting_when_nodes_were_told_different_things_then_the_difference_is_named(
    make_hosts: MakeHosts, train: Callable[[str], Path]
) -> None:
    hosts = make_hosts(2)
    script = train(WAITS)
    first = node(hosts, 0, "--nproc", "1", "--rdzv-id", "a", script, "0", nodes="3")
    wrong = {
        "AR313 --nproc is 2": ("--nproc", "2", "--rdzv-id", "a"),
        "AR312": ("--nproc", "1", "--rdzv-id", "b"),
        "AR311": ("--nproc", "1", "--rdzv-id", "a"),
    }
    good = node(hosts, 1, "--nproc", "1", "--rdzv-id", "a", script, "0", nodes="3")
    first.wait_for("2 of 3 nodes are here", 20)
    for said, options in wrong.items():
        (done,) = ended([node(hosts, 1, *options, script, "0", nodes="3", rank=1 if "311" in said else 2)])
        assert done.code == 2, done.story()
        assert said in done.err
        assert f"a node was refused: {said[:5]}" in first.err
    assert (
        "--nnodes is 2 on host"
        in ended([node(hosts, 1, "--rdzv-id", "a", script, "0", nodes="2", rank=1)])[0].err
    )
    third = node(hosts, 1, "--nproc", "1", "--rdzv-id", "a", script, "0", nodes="3", rank=2)
    assert [d.code for d in ended([first, good, third])] == [0, 0, 0]


def test_member_when_the_address_means_itself_then_that_is_said(
    make_hosts: MakeHosts, train: Callable[[str], Path]
) -> None:
    hosts = make_hosts(1)
    command = hosts.start(
        hosts.names[0],
        "allranks",
        "run",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "127.0.1.1",
        train(WAITS),
        "0",
    )
    (done,) = ended([command])
    assert done.code == 2
    assert "AR314" in done.err
    assert "the host itself" in done.err


@pytest.mark.parametrize("options", [(), ("--no-watch",)], ids=["watched", "not watched"])
def test_rank_when_killed_on_one_host_then_both_tell_it_and_end(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path, options: tuple[str, ...]
) -> None:
    hosts = make_hosts(2)
    commands = both(hosts, *options, "--nproc", "1", train(WAITS), "60")
    wait_for_file(tmp_path / "pid-1-0")
    os.kill(process_of_rank(commands[1]), signal.SIGKILL)
    for done in ended(commands):
        assert done.code == 137, done.story()
        assert (
            f"rank 1 of 2 on host {hosts.names[1]}" in done.err or f"rank 1 on {hosts.names[1]}" in done.err
        )
        assert "SIGKILL" in done.err


@pytest.mark.parametrize("how", ["cut", "blackhole", "poweroff", "agent"])
def test_node_when_lost_then_the_other_names_it_and_nothing_is_left(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path, how: str
) -> None:
    if how == "blackhole":
        need_commands("nft")
    hosts = make_hosts(2)
    first, second = both(hosts, "--nproc", "1", train(WAITS), "60")
    wait_for_file(tmp_path / "pid-1-0")
    if how == "agent":
        hosts.send(second, signal.SIGKILL)
    else:
        hosts.do(how, hosts.names[1])
    (done,) = ended([first])
    assert done.code == EXIT_MACHINE, done.story()
    assert "AR320" in done.err or "AR321" in done.err
    assert hosts.names[1] in done.err
    last = second.finish(20)
    assert not last.left_behind, last.story()
    if how in ("cut", "blackhole"):
        assert last.code == EXIT_MACHINE
        assert "AR322" in last.err


def test_hub_when_its_agent_is_killed_then_the_other_node_says_so_and_ends(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    first, second = both(hosts, "--nproc", "1", train(WAITS), "60")
    wait_for_file(tmp_path / "pid-1-0")
    hosts.send(first, signal.SIGKILL)
    (done,) = ended([second])
    assert done.code == EXIT_MACHINE
    assert "AR322" in done.err
    assert not first.finish(10).left_behind


def test_signal_when_sent_to_one_node_then_both_end_and_the_stop_file_is_everywhere(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    text = WAITS.replace(
        "import os, sys, time", "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)"
    )
    text = text.replace('os.path.exists("enough")', 'os.path.exists(os.environ["ALLRANKS_STOP_FILE"])')
    hosts = make_hosts(2)
    commands = both(hosts, "--nproc", "1", train(text), "60")
    wait_for_file(tmp_path / "pid-0-0")
    wait_for_file(tmp_path / "pid-1-0")
    hosts.send(commands[1], signal.SIGTERM)
    assert [d.code for d in ended(commands)] == [0, 0]


def test_restart_when_a_host_dies_then_the_job_goes_on_without_it_and_takes_in_who_comes(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    options = (
        "--nproc",
        "1",
        "--max-restarts",
        "3",
        "--rdzv-conf",
        "last_call_timeout=1",
        train(WAITS),
        "60",
    )
    first, second = (node(hosts, number, *options, nodes="1:2") for number in range(2))
    wait_for_file(tmp_path / "pid-1-0")
    hosts.do("poweroff", hosts.names[1])
    first.wait_for("ready 0 of 1 attempt 1", 30)
    third = node(hosts, 2, *options, nodes="1:2", rank=1)
    third.wait_for("taken in at the next restart", 20)
    os.kill(process_of_rank(first), signal.SIGKILL)
    wait_for_file(tmp_path / "pid-1-2")
    (tmp_path / "enough").touch()
    assert [d.code for d in ended([first, third])] == [0, 0]
    assert "ready 0 of 2 attempt 2" in first.out
    second.finish(10)


def test_ssh_client_when_killed_then_the_launcher_over_there_ends_its_ranks(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    need_commands("sshd", "ssh")
    hosts = make_hosts(2)
    hosts.do("sshd")
    config = f"/run/allranks-hosts/{hosts.prefix}/ssh_config"
    launcher = f"cd {tmp_path} && {' '.join(_allranks())} --nproc 2 {train(WAITS)} 60"
    client = hosts.start(hosts.names[0], "ssh", "-F", config, hosts.names[1], launcher)
    wait_for_file(tmp_path / "pid-1-0")
    client.wait_for("ready 0 of 2", 10)
    hosts.send(client, signal.SIGKILL)
    client.finish(10)
    deadline = time.monotonic() + 10
    listing = ""
    while time.monotonic() < deadline:
        listing = hosts.run(hosts.names[1], "ps", "-eo", "args").out
        if "train.py" not in listing:
            return
        time.sleep(0.1)
    raise AssertionError(listing)


@pytest.mark.parametrize(("powered", "code"), [(True, "AR316"), (False, "AR317")], ids=["refused", "silent"])
def test_member_when_nobody_answers_then_the_limit_ends_it(
    make_hosts: MakeHosts, train: Callable[[str], Path], powered: bool, code: str
) -> None:
    if not powered:
        need_commands("nft")
    hosts = make_hosts(2)
    if not powered:
        hosts.do("blackhole", hosts.names[0])
    (done,) = ended([node(hosts, 1, "--rdzv-conf", "join_timeout=4", train(WAITS), "0")])
    assert done.code == EXIT_MACHINE, done.story()
    assert code in done.err
    assert "waiting for node 0 at" in done.err


def test_ranks_when_a_node_cannot_start_them_then_all_end_with_its_error(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    hosts.run(hosts.names[1], "mount", "-o", "remount,ro", "/dev/shm")
    (tmp_path / "file").touch()  # a TMPDIR below which nothing can be made
    first = node(hosts, 0, "--nproc", "1", train(WAITS), "60")
    second = node(hosts, 1, "--nproc", "1", train(WAITS), "60", env={"TMPDIR": str(tmp_path / "file")})
    for done in ended([first, second]):
        assert done.code == EXIT_MACHINE, done.story()
        assert f"AR046 host {hosts.names[1]} cannot start its ranks" in done.err


def test_versions_when_they_differ_between_nodes_then_a_warning_on_each(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    hosts = make_hosts(2)
    script = train("print('well')")
    first = node(hosts, 0, "--nproc", "1", script)
    second = node(hosts, 1, "--nproc", "1", script, env={"PYTHONPATH": str(other.parent)})
    for done in ended([first, second]):
        assert done.code == 0, done.story()
        assert f"torch differs between the nodes: 1.0 on {hosts.names[1]}" in done.err


@pytest.mark.timeout(150)  # torch starts twice on both hosts
def test_restart_when_a_rank_is_killed_in_training_then_both_hosts_come_back(
    make_hosts: MakeHosts, train: Callable[[str], Path], tmp_path: Path
) -> None:
    kill = 'if step == 2 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": os.kill(os.getpid(), 9)'
    script = train(TRAINS.replace("for step in range(5):", f"for step in range(5):\n    {kill}"))
    done = ended(both(make_hosts(2), "--nproc", "1", "--max-restarts", "1", script), 120)
    assert [d.code for d in done] == [0, 0], "\n".join(d.story() for d in done)
    assert "rank 0 of 2 grad 10.0" in done[0].out
    for one in done:
        assert "restart 1 of 1" in one.err
