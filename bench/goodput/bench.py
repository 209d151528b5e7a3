"""How many useful updates per second are left when a rank is killed every 20 s? allranks beside torchrun with a save and load by hand.

    python bench/goodput/bench.py [--seconds 100] [--kill-every 20] [--rounds 1]

Both jobs are the same work on two CPU ranks, saved every 25 updates. An update is useful if it did not have to be done again: the figure is
the number of updates the training has reached at the end, divided by the time since the start of the command, start-up included. The
jobs run in turn. Where the first update comes later than the first kill, the machine is too busy for these figures.
torchrun gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its restart failed in 7 of 16 tries.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def command(way: str, folder: Path, port: int) -> list[str]:
    progress = str(folder / "progress")
    if way == "allranks":
        run = [
            str(BIN / "allranks"),
            "run",
            "--nproc",
            "2",
            "--max-restarts",
            "1000",
            "--run-dir",
            str(folder / "run"),
        ]
        return [*run, str(HERE / "job_allranks.py"), progress]
    run = [
        str(BIN / "torchrun"),
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1000",
        "--master-port",
        str(port),
    ]
    return [*run, str(HERE / "job_plain.py"), progress]


def ranks_of(mark: str) -> list[int]:
    """The ranks of a job: its processes with RANK in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"GOODPUT={mark}".encode() in variables and any(v.startswith(b"LOCAL_RANK=") for v in variables):
            found.append(int(entry.name))
    return found


def updates_of(folder: Path) -> int:
    try:
        return int((folder / "progress").read_text())
    except (OSError, ValueError):
        return 0


def measure(way: str, seconds: float, kill_every: float, rng: random.Random) -> dict[str, float | None]:
    folder, mark = Path(tempfile.mkdtemp()), f"{os.getpid()}-{time.monotonic_ns()}"
    env = {**os.environ, "GOODPUT": mark, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    begun = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command(way, folder, rng.randrange(20000, 32000)),
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    kills, next_kill, first_s = 0, begun + kill_every, None
    try:
        while time.monotonic() - begun < seconds and process.poll() is None:
            time.sleep(0.1)
            if first_s is None and updates_of(folder):
                first_s = round(time.monotonic() - begun, 1)
            if time.monotonic() >= next_kill:
                next_kill += kill_every
                ranks = ranks_of(mark)
                if ranks:
                    os.kill(rng.choice(ranks), signal.SIGKILL)
                    kills += 1
        wall = time.monotonic() - begun
        updates = updates_of(folder)
        ended = process.poll()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in ranks_of(mark):
            os.kill(pid, signal.SIGKILL)
    if ended is not None:
        print((folder / "log").read_text()[-2000:], file=sys.stderr)
    return {
        "updates": updates,
        "seconds": round(wall, 1),
        "per_s": round(updates / wall, 1),
        "first_update_after_s": first_s,
        "kills": kills,
        "gave_up": ended is not None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--kill-every", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for number in range(args.rounds):
        for way in ("allranks", "torchrun"):
            row = {
                "round": number,
                "way": way,
                **measure(way, args.seconds, args.kill_every, rng),
                "load": os.getloadavg()[0],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
