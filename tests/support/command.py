"""How does a test run a command as a user does? `run_command(...)`, and `allranks(...)` for our own.

    done = allranks("run", "--nproc", "2", "train.py", timeout_s=60)
    assert done.code == 0, done.story()

Whatever the command started is found afterwards by its session and by ALLRANKS_JOB, ended, and told in
`done.left_behind`, which must be empty unless the test says `may_leave=True`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pytest

from support.processes import describe, is_alive, kill, variable_holders, wait_until_gone

# Marks every process that a test's command starts, also those that leave its session.
MARK = "ALLRANKS_TEST_COMMAND"
# The product's own promise for what outlives its agent.
ORPHANS_GONE_WITHIN_S = 2.0
_DROPPED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Done:
    """A command that has ended."""

    args: list[str]
    code: int  # as subprocess: -9 for SIGKILL
    out: str
    err: str
    wall_s: float
    timed_out: bool = False
    left_behind: list[str] = field(default_factory=list)

    def story(self) -> str:
        """Everything it said, for a failing assertion."""
        head = f"$ {' '.join(self.args)}\nexit code {self.code} after {self.wall_s:.1f} s"
        late = " (ended by the test: too late)" if self.timed_out else ""
        return f"{head}{late}\n--- stdout\n{self.out[-6000:]}\n--- stderr\n{self.err[-6000:]}"


class Command:
    """A command that runs; `with start_command(...)` ends it and all it started."""

    def __init__(self, args: list[str], *, cwd: Path, env: Mapping[str, str], folder: Path) -> None:
        self.args = args
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._out, self._err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self._started = time.monotonic()
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                args,
                cwd=cwd,
                env={**env, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_text(errors="replace")

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to the command itself, not to what it started."""
        self.process.send_signal(sig)

    def others(self) -> list[int]:
        """The living processes that it started, at any depth."""
        return [pid for pid in variable_holders(MARK, self.mark) if pid != self.process.pid]

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Until `text` stands in its output; AssertionError with all it said if it does not come."""
        deadline = time.monotonic() + timeout_s
        while text not in self.out + self.err:
            if time.monotonic() > deadline or self.process.poll() is not None:
                if text in self.out + self.err:
                    return
                raise AssertionError(f"{text!r} did not come\n--- stdout\n{self.out}\n--- stderr\n{self.err}")
            time.sleep(0.05)  # files have no readiness to wait on

    def finish(self, timeout_s: float, orphans_s: float = ORPHANS_GONE_WITHIN_S) -> Done:
        """Wait for its end, then for the end of all that it started; what is left is killed and named."""
        timed_out = False
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            self.process.kill()
            self.process.wait(10)
        wall_s = time.monotonic() - self._started
        left = wait_until_gone(self.others(), 0 if timed_out else orphans_s)
        told = [describe(pid) for pid in left]
        self.kill_all()
        return Done(self.args, self.process.returncode, self.out, self.err, wall_s, timed_out, told)

    def kill_all(self) -> None:
        """End it and everything that it started."""
        for pid in self.others():
            kill(pid)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        wait_until_gone([pid for pid in self.others() if is_alive(pid)], 5)


class StartCommand(Protocol):
    """The type of the fixture start_command."""

    def __call__(
        self, *args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Command: ...


class RunCommand(Protocol):
    """The type of the fixtures run_command and allranks."""

    def __call__(
        self,
        *args: str | Path,
        timeout_s: float = 100,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        may_leave: bool = False,
    ) -> Done: ...


@pytest.fixture
def start_command(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCommand]:
    """Start a command and go on; it is ended with the test."""
    running: list[Command] = []
    folder = tmp_path_factory.mktemp("command")

    def start(*args: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Command:
        command = Command([*map(str, args)], cwd=cwd or tmp_path, env=clean_env(env), folder=folder)
        running.append(command)
        return command

    yield start
    for command in running:
        command.kill_all()


@pytest.fixture
def run_command(start_command: StartCommand) -> RunCommand:
    """Run a command to its end; fails if it is too late or leaves a process behind."""

    def run(
        *args: str | Path,
        timeout_s: float = 100,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        may_leave: bool = False,
    ) -> Done:
        command = start_command(*args, cwd=cwd, env=env)
        done = command.finish(timeout_s)
        assert not done.timed_out, done.story()
        # Records of a job are memory; the name ends with the agent's pid (run/preflight.py).
        records = [str(path) for path in Path("/dev/shm").glob(f"allranks-*-{command.process.pid}")]
        assert may_leave or not records, f"shared memory left: {records}\n{done.story()}"
        assert may_leave or not done.left_behind, f"left running: {done.left_behind}\n{done.story()}"
        return done

    return run


@pytest.fixture
def allranks(run_command: RunCommand) -> RunCommand:
    """Run our own command, the one beside this Python."""

    def run(
        *args: str | Path,
        timeout_s: float = 100,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        may_leave: bool = False,
    ) -> Done:
        return run_command(
            command_path("allranks"), *args, timeout_s=timeout_s, cwd=cwd, env=env, may_leave=may_leave
        )

    return run


def command_path(name: str) -> Path:
    """A command installed beside this Python: allranks, torchrun."""
    return Path(sys.executable).parent / name


def clean_env(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without anything of a job, so that a test means the same inside one."""
    foreign = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "ALLRANKS_", "OMP_NUM_THREADS", "PYTEST_")
    kept = {n: v for n, v in os.environ.items() if n not in _DROPPED and not n.startswith(foreign)}
    return {**kept, "PYTHONUNBUFFERED": "1", **(more or {})}
