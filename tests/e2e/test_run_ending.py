"""How does a job end: exit codes, signals, nothing left behind, restarts?"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from allranks.run.processes import state_of
from allranks.run.signals import SAME_REQUEST_S
from support.command import Command, Done, RunCommand, StartCommand, command_path
from support.processes import is_alive

pytestmark = pytest.mark.e2e

# Starts a child in a session of its own that ignores what can be ignored, as a stuck loader worker would.
WITH_CHILD = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
code = "import signal, time\\nfor n in (1, 2, 10, 12, 15): signal.signal(n, signal.SIG_IGN)\\ntime.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(f"pids{rank}", "w").write(f"{os.getpid()} {child.pid}")
"""
SAVES = (
    WITH_CHILD
    + """
def save(number, frame):
    open(f"saved{rank}", "w").write(signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, save)
print("ready", flush=True)
time.sleep(60)
"""
)
IGNORES = (
    WITH_CHILD
    + """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""
)
STOPPED = (
    WITH_CHILD
    + """
print("ready", flush=True)
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""
)


def launch(
    start: StartCommand, folder: Path, text: str, *options: str, env: dict[str, str] | None = None
) -> Command:
    """Start a job of two ranks and wait until rank 0 is ready and rank 1 has its child."""
    (folder / "train.py").write_text(text)
    command = start(
        command_path("allranks"), "run", "--nproc", "2", "--no-watch", *options, "train.py", env=env
    )
    command.wait_for("ready", 30)
    deadline = time.monotonic() + 20
    while not all((folder / f"pids{r}").exists() and (folder / f"pids{r}").read_text() for r in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return command


def nothing_is_left(done: Done, folder: Path) -> None:
    assert not done.left_behind, done.story()
    pids = [int(p) for r in (0, 1) for p in (folder / f"pids{r}").read_text().split()]
    assert not [p for p in pids if is_alive(p)]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT]
)
def test_signal_when_every_rank_saves_and_ends_with_0_then_so_does_the_launcher(
    start_command: StartCommand, tmp_path: Path, number: signal.Signals
) -> None:
    command = launch(start_command, tmp_path, SAVES)
    wait_for_handlers(tmp_path)
    command.send(number)
    done = command.finish(20)
    assert done.code == 0, done.story()
    assert [(tmp_path / f"saved{r}").read_text() for r in (0, 1)] == [number.name] * 2
    nothing_is_left(done, tmp_path)


def wait_for_handlers(folder: Path) -> None:
    """Rank 1 has installed its handlers too: SigCgt in /proc has the bit of SIGTERM."""
    pid = int((folder / "pids1").read_text().split()[0])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
        if int(caught, 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.02)
    raise AssertionError("no handler")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_when_it_comes_twice_then_all_is_killed_at_once(
    start_command: StartCommand, tmp_path: Path, number: signal.Signals
) -> None:
    command = launch(start_command, tmp_path, IGNORES)
    command.send(number)
    # The second is a second one, not the same delivered twice.
    time.sleep(0.5 if number == signal.SIGINT else SAME_REQUEST_S + 0.2)
    assert command.process.poll() is None
    command.send(number)
    done = command.finish(10)
    assert done.code == 128 + number, done.story()
    nothing_is_left(done, tmp_path)


@pytest.mark.parametrize("text", [IGNORES, STOPPED], ids=["ignores", "stopped"])
def test_launcher_when_killed_then_ranks_and_their_children_go_with_it(
    start_command: StartCommand, tmp_path: Path, text: str
) -> None:
    command = launch(start_command, tmp_path, text)
    command.send(signal.SIGKILL)
    done = command.finish(10)  # asserts nothing by itself: left_behind is what lives 2 s later
    nothing_is_left(done, tmp_path)
    assert not list(Path("/dev/shm").glob(f"allranks-*-{command.process.pid}"))


def test_launcher_when_guard_and_agent_are_killed_then_the_ranks_die(
    start_command: StartCommand, tmp_path: Path
) -> None:
    command = launch(start_command, tmp_path, IGNORES)
    guard = next(p for p in command.others() if b"guard.py" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(guard, signal.SIGKILL)
    command.send(signal.SIGKILL)
    command.process.wait(10)
    ranks = [int((tmp_path / f"pids{r}").read_text().split()[0]) for r in (0, 1)]
    deadline = time.monotonic() + 5
    while any(map(is_alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, ranks))


def test_guard_when_killed_alone_then_another_takes_its_place(
    start_command: StartCommand, tmp_path: Path
) -> None:
    command = launch(start_command, tmp_path, IGNORES)

    def guards() -> list[int]:
        return [p for p in command.others() if b"guard.py" in Path(f"/proc/{p}/cmdline").read_bytes()]

    (first,) = guards()
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while guards() in ([], [first]) and time.monotonic() < deadline:
        time.sleep(0.05)
    command.send(signal.SIGKILL)
    nothing_is_left(command.finish(10), tmp_path)


def test_launcher_when_the_reader_of_its_output_is_gone_then_all_ends(
    start_command: StartCommand, tmp_path: Path
) -> None:
    # Rank 0 is ready when both are: what head has seen is the end of the job.
    both = 'while not all(os.path.exists(f"pids{r}") and os.path.getsize(f"pids{r}") for r in (0, 1)): time.sleep(0.02)\n'
    (tmp_path / "train.py").write_text(IGNORES.replace('print("ready"', f'{both}print("ready"'))
    command = start_command(
        "bash", "-c", f"{command_path('allranks')} run --nproc 2 --no-watch train.py 2>&1 | head -n 2 > seen"
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "seen").exists() or b"ready" not in (tmp_path / "seen").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    nothing_is_left(command.finish(20), tmp_path)


def test_rank_when_it_fails_then_all_end_though_they_ignore_sigterm(
    allranks: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        IGNORES.replace("time.sleep(60)", "time.sleep(0.5)\nif rank == 1: sys.exit(5)\ntime.sleep(60)")
    )
    done = allranks("run", "--nproc", "2", "train.py")
    assert done.code == 5, done.story()
    nothing_is_left(done, tmp_path)


def test_rank_when_killed_by_a_signal_then_128_plus_n(allranks: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    )
    done = allranks("run", "--nproc", "2", "train.py")
    assert done.code == 137, done.story()
    assert "rank 1" in done.err
    assert "SIGKILL" in done.err


def test_requeue_exit_code_when_preempted_and_saved_then_it_is_given(
    start_command: StartCommand, tmp_path: Path
) -> None:
    text = SAVES + "\n"
    command = launch(start_command, tmp_path, text, "--requeue-exit-code", "85")
    wait_for_handlers(tmp_path)
    command.send(signal.SIGTERM)
    assert command.finish(20).code == 85


def test_stop_before_when_the_end_is_near_then_the_stop_file_appears_and_ranks_are_asked(
    start_command: StartCommand, tmp_path: Path
) -> None:
    text = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import json, os, sys, time
print("ready", flush=True)
open(f"pids{os.environ['RANK']}", "w").write(f"{os.getpid()} {os.getpid()}")
while not os.path.exists(os.environ["ALLRANKS_STOP_FILE"]): time.sleep(0.02)
print(json.load(open(os.environ["ALLRANKS_STOP_FILE"]))["why"], flush=True)
"""
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "scontrol").write_text('#!/bin/sh\necho "$@" > requeued\n')
    (fake / "scontrol").chmod(0o755)
    env = {
        "SLURM_JOB_END_TIME": str(int(time.time()) + 608),
        "SLURM_JOB_ID": "77",
        "PATH": f"{fake}:{os.environ['PATH']}",
    }
    command = launch(start_command, tmp_path, text, "--stop-before", "10m", "--requeue", env=env)
    done = command.finish(30)
    assert done.code == 0, done.story()
    assert "SIGTERM" in done.out
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"


def test_ctrl_z_when_pressed_then_the_ranks_stop_too_and_go_on_with_the_launcher(
    start_command: StartCommand, tmp_path: Path
) -> None:
    command = launch(start_command, tmp_path, SAVES)
    wait_for_handlers(tmp_path)
    pids = [int((tmp_path / f"pids{r}").read_text().split()[0]) for r in (0, 1)] + [command.process.pid]

    def until_state(states: str) -> None:
        deadline = time.monotonic() + 10
        while not all(state_of(pid) in states for pid in pids):
            assert time.monotonic() < deadline, [state_of(pid) for pid in pids]
            time.sleep(0.02)

    command.send(signal.SIGTSTP)
    until_state("T")
    command.send(signal.SIGCONT)
    until_state("RSD")
    command.send(signal.SIGTERM)
    assert command.finish(20).code == 0


# -- restarts -------------------------------------------------------------------------------------------------------------

FAILS = """
import os, sys, time, signal
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
print("attempt", attempt, "port", os.environ["MASTER_PORT"], flush=True)
"""


def test_restart_when_a_rank_is_killed_then_the_job_comes_back_on_a_fresh_port(
    allranks: RunCommand, tmp_path: Path
) -> None:
    kill = "if attempt == 0 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nif attempt == 0: time.sleep(60)\n"
    (tmp_path / "train.py").write_text(FAILS + kill)
    done = allranks("run", "--nproc", "2", "--max-restarts", "2", "train.py")
    assert done.code == 0, done.story()
    first, second = [line.split() for line in done.out.splitlines()]
    assert (first[1], second[1]) == ("0", "1")
    assert first[3] != second[3]
    assert "restart 1 of 2" in done.err
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "ranks" / "rank1.1.log").exists()


def test_restart_when_the_same_exception_comes_back_then_it_stops_and_says_so(
    allranks: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        FAILS + "if rank == 1: raise ValueError(time.time())\ntime.sleep(60)\n"
    )
    done = allranks("run", "--nproc", "2", "--max-restarts", "5", "train.py")
    assert done.code == 1
    assert "AR044" in done.err
    assert done.out.count("attempt") == 2, done.story()


def test_restart_when_none_is_left_then_the_kinds_are_counted(allranks: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS + "if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)\n")
    done = allranks("run", "--nproc", "2", "--max-restarts", "1", "train.py")
    assert done.code == 137
    assert "0 by the script, 2 by the machines" in done.err


# -- before ranks start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["nothere.py"], "AR040", "did you mean there.py"),
        (["folder"], "AR041", "directory"),
        (["--no-python", "./there.py"], "AR040", "not executable"),
        (["--master-addr", "no-such.invalid", "there.py"], "AR038", "does not resolve"),
        (["--nnodes", "2", "there.py"], "AR039", "--node-rank"),
        (["--nproc", "0", "there.py"], "AR035", "--nproc"),
        (["--run-dir", "there.py/x", "there.py"], "AR042", "run directory"),
    ],
)
def test_preflight_when_it_cannot_work_then_an_error_before_any_rank(
    allranks: RunCommand, tmp_path: Path, argv: list[str], code: str, says: str
) -> None:
    (tmp_path / "there.py").write_text("open('ran', 'w')")
    (tmp_path / "folder").mkdir()
    done = allranks("run", "--nproc", "2", *argv)
    assert done.code == 2, done.story()
    assert code in done.err
    assert says in done.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [[], ["--nnodes", "2", "--node-rank", "0"]], ids=["one node", "hub"])
def test_preflight_when_the_port_is_taken_then_who_holds_it_and_a_free_one(
    allranks: RunCommand, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "there.py").write_text("")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = allranks("run", *options, "--master-addr", "127.0.0.1", "--master-port", str(port), "there.py")
    assert done.code == 2, done.story()
    assert f"AR037 port {port} is in use" in done.err
    assert f"process {os.getpid()} listens on it" in done.err
    assert "--master-port" in done.err


def test_module_when_it_is_not_there_then_python_says_so(allranks: RunCommand, tmp_path: Path) -> None:
    done = allranks("run", "--nproc", "1", "-m", "no_such_module")
    assert done.code == 1
    assert "No module named no_such_module" in done.out + done.err


def test_module_and_program_then_they_run(allranks: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("import sys\nprint('args', sys.argv[1:])\n")
    assert "args ['a b']" in allranks("run", "--nproc", "2", "-m", "mod", "a b").out
    done = allranks(
        "run", "--nproc", "2", "--no-python", sys.executable, "-c", "import os; print(os.environ['RANK'])"
    )
    assert done.out == "0\n", done.story()


def test_preflight_when_another_program_listens_there_then_it_is_named(
    allranks: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "there.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        meeting = ("--master-addr", "127.0.0.1", "--master-port", port)
        done = allranks("run", "--nnodes", "2", "--node-rank", "1", *meeting, "there.py")
    assert done.code == 2, done.story()
    assert "AR315" in done.err
    assert str(os.getpid()) in done.err


@pytest.mark.parametrize("where", [">&-", ">/dev/full", ">&- 2>&-"])
def test_launcher_when_its_output_cannot_be_written_then_the_job_is_not_hurt(
    run_command: RunCommand, tmp_path: Path, where: str
) -> None:
    (tmp_path / "train.py").write_text("import os\nprint('hello')\nopen(f\"ran{os.environ['RANK']}\", 'w')\n")
    done = run_command("bash", "-c", f"{command_path('allranks')} run --nproc 2 train.py {where}")
    assert done.code == 0, done.story()
    assert (tmp_path / "ran0").exists()
    assert (tmp_path / "ran1").exists()


def test_two_agents_when_on_one_host_then_they_meet_and_do_not_end_each_other(
    start_command: StartCommand, tmp_path: Path
) -> None:
    text = "import os, time\nr, w = os.environ['RANK'], os.environ['WORLD_SIZE']\ntime.sleep(int(r))\nprint('rank', r, 'of', w)\n"
    (tmp_path / "train.py").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}")
    started = [
        start_command(command_path("allranks"), "run", *meeting, "--nproc", "1", "train.py") for _ in range(2)
    ]
    done = [c.finish(40) for c in started]
    assert [d.code for d in done] == [0, 0], done[0].story() + done[1].story()
    assert "rank 0 of 2" in done[0].out + done[1].out
