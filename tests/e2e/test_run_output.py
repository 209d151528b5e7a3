"""What does the user see of the ranks, and what is kept?"""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from support.command import RunCommand, clean_env, command_path

pytestmark = pytest.mark.e2e

TALKS = """
import os, sys
rank = os.environ["RANK"]
print(f"out of {rank}")
print(f"err of {rank}", file=sys.stderr)
"""
STORMS = """
import os, sys
rank = int(os.environ["RANK"])
for i in range(400):
    sys.stdout.write(f"{rank}:{i}:" + "x" * 200 + "\\n")
"""
BINARY = """
import os, sys
out = sys.stdout.buffer
out.write(bytes(range(256)) * 64)
out.write(b"y" * (10 << 20))
out.flush()
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def test_run_when_all_is_well_then_rank_0_is_shown_as_is_and_all_are_kept(
    allranks: RunCommand, tmp_path: Path
) -> None:
    done = allranks("run", "--nproc", "2", script(tmp_path, TALKS))
    assert (done.code, done.out) == (0, "out of 0\n"), done.story()
    assert "err of 0" in done.err.splitlines()
    assert "of 1" not in done.out + done.err
    kept = run_dir(tmp_path)
    assert (kept / "ranks" / "rank1.log").read_text() == "out of 1\nerr of 1\n"
    said = json.loads((kept / "run.json").read_text())
    assert (said["world_size"], said["exit_code"], said["exit_codes"]) == (2, 0, {"0": 0, "1": 0})


def test_run_when_all_ranks_are_shown_then_whole_lines_with_their_rank(
    allranks: RunCommand, tmp_path: Path
) -> None:
    done = allranks("run", "--nproc", "3", "--show-ranks", "all", script(tmp_path, STORMS))
    lines = done.out.splitlines()
    assert len(lines) == 1200, done.story()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {rank}:{i}:" + "x" * 200 for i in range(400)]


def test_run_when_output_is_binary_and_has_a_giant_line_then_no_byte_changes(
    allranks: RunCommand, tmp_path: Path
) -> None:
    done = allranks("run", "--nproc", "2", script(tmp_path, BINARY))
    assert done.code == 0, done.story()
    for rank in (0, 1):
        kept = (run_dir(tmp_path) / "ranks" / f"rank{rank}.log").read_bytes()
        assert kept == bytes(range(256)) * 64 + b"y" * (10 << 20)


def test_run_when_giant_lines_are_prefixed_then_they_are_whole(allranks: RunCommand, tmp_path: Path) -> None:
    text = 'import os\nprint(os.environ["RANK"] * (10 << 20))\n'
    done = allranks("run", "--nproc", "2", "--show-ranks", "all", script(tmp_path, text))
    assert sorted(done.out.splitlines()) == [f"[rank {r}] " + str(r) * (10 << 20) for r in (0, 1)]


def test_run_when_nobody_reads_our_output_then_no_rank_waits(tmp_path: Path) -> None:
    text = 'import os\nprint("z" * (4 << 20), flush=True)\nopen(f"done{os.environ[\'RANK\']}", "w").close()\n'
    process = subprocess.Popen(
        [command_path("allranks"), "run", "--nproc", "2", script(tmp_path, text)],
        cwd=tmp_path,
        env=clean_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "done0").exists() and time.monotonic() < deadline:
            time.sleep(0.05)  # a file has no readiness to wait on
        assert (tmp_path / "done0").exists()
        out, _ = process.communicate(timeout=30)
        assert out.count(b"z") == 4 << 20
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_run_when_our_stdout_is_a_terminal_then_rank_0_has_one_too(tmp_path: Path) -> None:
    text = (
        "import os, sys, shutil\n"
        'print("tty", sys.stdout.isatty(), sys.stderr.isatty(), shutil.get_terminal_size().columns)\n'
        'sys.stdout.write("\\r 10%"); sys.stdout.write("\\r100%\\n")\n'
    )
    out = in_terminal([command_path("allranks"), "run", "--nproc", "2", script(tmp_path, text)], tmp_path)
    assert b"tty True True 97\r\n" in out
    assert b"\r 10%\r100%\r\n" in out
    assert (run_dir(tmp_path) / "ranks" / "rank1.log").read_text().startswith("tty False False")


def in_terminal(args: list, cwd: Path) -> bytes:
    """Run a command on a pseudo-terminal of 97 columns; what appeared there."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
    env = {**clean_env(), "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):
        env.pop(name, None)
    process = subprocess.Popen(
        args, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    out, deadline = b"", time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    part = os.read(ours, 65536)
                except OSError:
                    break
                out += part
                if not part:
                    break
            elif process.poll() is not None:
                break
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return out


def test_run_when_a_rank_raises_then_one_story_and_no_traceback_of_others(
    allranks: RunCommand, tmp_path: Path
) -> None:
    text = """
import os, time
if os.environ["RANK"] == "1":
    time.sleep(0.3)
    raise KeyError("weights")
try:
    time.sleep(30)
finally:
    pass
"""
    done = allranks("run", "--nproc", "2", "--no-watch", script(tmp_path, text))
    assert done.code == 1
    assert "rank 1 of 2 on host" in done.err
    assert "raised KeyError: 'weights' at train.py:5" in done.err
    assert done.err.count("Traceback") == 1, done.story()


def test_run_when_rank_0_raises_then_its_traceback_is_shown_once(
    allranks: RunCommand, tmp_path: Path
) -> None:
    text = (
        'import os, time\nprint("before", flush=True)\nif os.environ["RANK"] == "0": 1 / 0\ntime.sleep(30)\n'
    )
    done = allranks("run", "--nproc", "2", "--no-watch", script(tmp_path, text))
    assert done.out == "before\n"
    assert done.err.count("ZeroDivisionError: division by zero\n") == 1, done.story()
    assert "Traceback" in (run_dir(tmp_path) / "ranks" / "rank0.log").read_text()


def test_run_when_rank_0_survives_a_traceback_then_it_is_shown(allranks: RunCommand, tmp_path: Path) -> None:
    text = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\nprint('after')\n"
    done = allranks("run", "--nproc", "1", script(tmp_path, text))
    assert (done.code, done.out) == (0, "after\n")
    assert "ZeroDivisionError" in done.err


def test_run_when_json_is_asked_then_the_story_is_one_object_on_stdout(
    allranks: RunCommand, tmp_path: Path
) -> None:
    text = 'import os, sys, time\nif os.environ["RANK"] == "1": sys.exit(7)\ntime.sleep(30)\n'
    done = allranks("run", "--nproc", "2", "--json", "--no-watch", script(tmp_path, text))
    told = json.loads(done.out.splitlines()[-1])
    assert (told["version"], told["rank"], told["exit_code"], done.code) == (1, 1, 7, 7)


def test_run_when_log_dir_is_given_then_the_logs_are_there(allranks: RunCommand, tmp_path: Path) -> None:
    done = allranks(
        "run", "--nproc", "2", "--log-dir", "logs", "--run-dir", "r s'/x", "-t", "3", script(tmp_path, TALKS)
    )
    assert done.code == 0, done.story()
    assert (tmp_path / "logs" / "x" / "rank1.log").read_text() == "out of 1\nerr of 1\n"
    assert "[rank 1] out of 1" in done.out
