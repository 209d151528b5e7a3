"""Become the rank's program, and die with the agent.

Run as a file by `python -I -S exec_rank.py AGENT_PID PROGRAM ARGS...`: free of allranks, so that it starts in some 20 ms. The
kernel's parent-death signal must be asked for in the child itself; doing it in Python between fork and exec (preexec_fn) can deadlock
in an agent that has threads.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    agent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes  # costs 10 ms: only where it serves

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)  # the agent died before the kernel knew what to do then
    if (cores := os.environ.pop("ALLRANKS_CORES", "")) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # this interpreter ignores them; an exec hands that on
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(126 if isinstance(error, PermissionError) else 127)


if __name__ == "__main__":
    main()
