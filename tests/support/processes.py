"""Which processes belong to a test, and how are they ended? (Linux: /proc. Elsewhere the lists are empty.)"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def state_of(pid: int) -> str:
    """The state letter of a process (R, S, T, Z ...), or '' if there is none."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def is_alive(pid: int) -> bool:
    """It exists and is not a zombie: pid 1 of a container reaps late."""
    return state_of(pid) not in ("", "Z", "X")


def session_members(sid: int) -> list[str]:
    """'pid command' of every living process in the session, without its leader."""
    return [
        describe(pid)
        for pid in _pids()
        if pid != sid and is_alive(pid) and (s := _stat(pid)) and int(s[3]) == sid
    ]


def children_of(pid: int) -> list[int]:
    """The living children of a process."""
    return [p for p in _pids() if (s := _stat(p)) and int(s[1]) == pid and s[0] not in ("Z", "X")]


def variable_holders(name: str, value: str) -> list[int]:
    """The living processes whose environment holds name=value (as it was when they started)."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _pids():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in variables and is_alive(pid):
            found.append(pid)
    return found


def describe(pid: int) -> str:
    """'pid command line' of a process, for messages."""
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except OSError:
        command = "(gone)"
    return f"{pid} [{state_of(pid)}] {command}"


def kill_session(sid: int) -> None:
    """SIGKILL the leader and every member of the session, by pid, and see them gone."""
    members = [pid for pid in _pids() if (s := _stat(pid)) and int(s[3]) == sid]
    for pid in {sid, *members}:
        kill(pid)
    wait_until_gone(members, timeout_s=5)


def kill(pid: int) -> None:
    """SIGKILL one process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """Those of the processes that still live after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)  # they are not our children: nothing to wait on
    return left


def _pids() -> list[int]:
    if not Path("/proc/self").exists():
        return []
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the command name: state, ppid, pgrp, session, ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rsplit(")", 1)[-1].split()
