"""Are the hosts of the tests real: a name, a network and processes of their own, and gloo across them?"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import Hosts

MakeHosts = Callable[[int], Hosts]

AVERAGE = """
import os, torch, torch.distributed as dist
os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} on {os.uname().nodename}: {value.item()}")
dist.destroy_process_group()
"""


def test_hosts_when_up_then_each_has_its_name_and_reaches_the_other(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    first, second = hosts.names
    assert hosts.run(first, "hostname").out.strip() == first
    look_up = f"import socket; print(socket.gethostbyname({second!r}))"
    assert hosts.run(first, sys.executable, "-c", look_up).out.strip() == hosts.address(2)


def test_hosts_when_gloo_runs_across_them_then_all_reduce_is_right(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    script = tmp_path / "average.py"
    script.write_text(AVERAGE)
    started = [
        hosts.start(
            host,
            sys.executable,
            script,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": hosts.address(1),
                "MASTER_PORT": "29500",
            },
        )
        for rank, host in enumerate(hosts.names)
    ]
    for rank, command in enumerate(started):
        done = command.finish(timeout_s=40)
        assert done.code == 0, done.story()
        assert done.out.strip() == f"rank {rank} on {hosts.names[rank]}: 3.0"
        assert not done.left_behind


def test_hosts_when_a_cable_is_cut_then_nothing_arrives(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    hosts.do("cut", hosts.names[1])
    connect = f"import socket; socket.create_connection(({hosts.address(2)!r}, 1), timeout=0.5)"
    cut = hosts.run(hosts.names[0], sys.executable, "-c", connect)
    assert "timed out" in cut.err, cut.story()
    hosts.do("heal", hosts.names[1])
    healed = hosts.run(hosts.names[0], sys.executable, "-c", connect)
    assert "refused" in healed.err, healed.story()


def test_send_when_a_command_on_a_host_gets_a_signal_then_the_command_itself_does(
    make_hosts: MakeHosts,
) -> None:
    hosts = make_hosts(1)
    program = "import signal; signal.signal(15, lambda *_: print('asked')); print('up'); signal.pause()"
    command = hosts.start(hosts.names[0], sys.executable, "-c", program)
    command.wait_for("up", timeout_s=10)
    hosts.send(command, signal.SIGTERM)
    assert command.finish(timeout_s=10).out.split() == ["up", "asked"]


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_hosts_when_down_then_no_namespace_is_left(make_hosts: MakeHosts, num_hosts: int) -> None:
    hosts = make_hosts(num_hosts)
    assert all(Path("/run/netns", name).exists() for name in hosts.names)
    hosts.down()
    assert not [path for path in Path("/run/netns").iterdir() if path.name.startswith(hosts.prefix)]
