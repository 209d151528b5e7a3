"""How does a test get several hosts? `hosts = make_hosts(2)`; each has a network, a name and processes of its own.

    first, second = hosts.names
    done = hosts.run(first, "hostname")                      # to its end
    command = hosts.start(second, "allranks", "run", ...)    # and go on
    hosts.do("cut", second)                                  # pull the cable; see hosts/make_hosts.sh for more

The hosts hang on a switch in a namespace of its own: nothing that they send can leave the machine.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from support.command import Command, Done, StartCommand
from support.needs import need_namespaces
from support.processes import children_of

SCRIPT = Path(__file__).parent / "hosts" / "make_hosts.sh"
NET = "10.77.0"
_count = itertools.count()


class Hosts:
    """Some hosts: up() and down() them."""

    def __init__(self, num_hosts: int, start_command: StartCommand) -> None:
        # Names are interface names too: at most 15 letters. The pid keeps two test runs apart.
        self.prefix = f"t{os.getpid()}{'abcdefgh'[next(_count) % 8]}"
        self.names = [f"{self.prefix}{number}" for number in range(1, num_hosts + 1)]
        self._start_command = start_command

    def up(self) -> None:
        """Bring them up; takes 0.1 s a host."""
        self.do("up", str(len(self.names)))

    @staticmethod
    def address(number: int) -> str:
        """The address of host `number`, counted from 1."""
        return f"{NET}.{number}"

    def do(self, *words: str) -> str:
        """One word of make_hosts.sh: cut, heal, blackhole, poweroff, freeze, rate, ...; what it printed."""
        done = subprocess.run(
            [str(SCRIPT), *words], env=self._env(), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"make_hosts.sh {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, host: str, *args: str | Path, env: Mapping[str, str] | None = None) -> Command:
        """Start a command on a host; bare names are looked up beside this Python first."""
        first, *rest = args
        beside = Path(sys.executable).parent / first
        program = beside if beside.exists() else first
        return self._start_command(SCRIPT, "exec", host, program, *rest, env={**self._names(), **(env or {})})

    def run(
        self, host: str, *args: str | Path, timeout_s: float = 30, env: Mapping[str, str] | None = None
    ) -> Done:
        """Run a command on a host to its end."""
        done = self.start(host, *args, env=env).finish(timeout_s)
        assert not done.timed_out, done.story()
        return done

    @staticmethod
    def send(command: Command, sig: signal.Signals) -> None:
        """Send a signal to a command on a host: it is the child of the one that entered the host."""
        for pid in children_of(command.process.pid):
            os.kill(pid, sig)

    def down(self) -> None:
        """Take everything away, also after a failure half way up."""
        subprocess.run([str(SCRIPT), "down"], env=self._env(), capture_output=True, timeout=60, check=False)

    def _names(self) -> dict[str, str]:
        return {"HOSTS_PREFIX": self.prefix, "HOSTS_NET": NET}

    def _env(self) -> dict[str, str]:
        return {**os.environ, **self._names()}


@pytest.fixture
def make_hosts(start_command: StartCommand) -> Iterator[Callable[[int], Hosts]]:
    """Bring up hosts; they go down with the test, whatever happened."""
    need_namespaces()
    made: list[Hosts] = []

    def make(num_hosts: int) -> Hosts:
        hosts = Hosts(num_hosts, start_command)
        made.append(hosts)  # before it is up: half of it may be
        hosts.up()
        return hosts

    yield make
    for hosts in made:
        hosts.down()


def process_of_rank(command: Command, script: str = "train.py") -> int:
    """The pid, as this machine sees it, of the rank that a launcher on a host has started."""
    waiting = children_of(command.process.pid)
    while waiting:
        pid = waiting.pop()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(word.endswith(script.encode()) for word in words) and b"run" not in words:
            return pid
        waiting += children_of(pid)
    raise AssertionError("no rank")
