"""Who ends the ranks when the agent itself is killed?

This small process does. The agent starts it as a file (`python -I -S guard.py JOB_ID AGENT_PID PATH...`) and holds the other
end of its stdin: lines "+PID" and "-PID" keep the list of process groups, "done" says that all is well. The end of the stream
without "done" means that the agent is gone: then every group, and every process that carries the agent's ALLRANKS_JOB and
ALLRANKS_AGENT_PID (loader workers in sessions of their own, what somebody daemonized, what is stopped or stuck) is killed,
and the PATHs below shared memory are removed.

The kernel's parent-death signal takes the ranks themselves even sooner, but not their children.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def carriers(job: str, agent: int) -> list[int]:
    """Pids of all processes that came from this agent's ranks, by their environment; [] where there is no /proc."""
    marks, pids = {f"ALLRANKS_JOB={job}".encode(), f"ALLRANKS_AGENT_PID={agent}".encode()}, []
    for entry in os.listdir("/proc") if os.path.isdir("/proc/self") else []:  # noqa: PTH208, PTH112 - the quick ones
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:  # noqa: PTH123
                if marks.issubset(file.read().split(b"\0")) and int(entry) != os.getpid():
                    pids.append(int(entry))
        except OSError:
            continue
    return pids


def kill_all(groups: set[int], job: str, agent: int, limit_s: float = 1.5) -> None:
    """SIGKILL to the groups and to whatever carries the job, again until nothing is left or the time is over."""
    deadline = time.monotonic() + limit_s
    while True:
        for group in groups:
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        left = carriers(job, agent)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def main() -> None:
    job, agent, paths = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        if word[:1] == "+":
            groups.add(int(word[1:]))
        elif word[:1] == "-":
            groups.discard(int(word[1:]))
    kill_all(groups, job, agent)
    for path in paths:
        shutil.rmtree(Path(path), ignore_errors=True)


if __name__ == "__main__":
    main()
