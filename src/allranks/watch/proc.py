# ruff: noqa: PTH115, PTH116, PTH208 - /proc is read tens of times a second; os is 5 times quicker than pathlib there
"""What does the kernel say about a process, its host's memory and its connections?

Reads of /proc and /sys only; what cannot be read (another system, no right, gone) is empty, never an error.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from allranks.watch.evidence import Socket

_TICK_S = 1.0 / (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
_MEMORY_GROUPS = ("/sys/fs/cgroup/memory", "/sys/fs/cgroup")
_ESTABLISHED, _LISTEN = "01", "0A"
_WRITING = 1 | 2  # O_WRONLY | O_RDWR


@dataclass(frozen=True, slots=True)
class Times:
    """Processor time of a process at one moment."""

    at_s: float
    process_s: float
    main_s: float
    main_waited_s: float
    """Time its main thread was ready and got no core."""


def read(path: str) -> str:
    """The text of a small file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - 4 us less than Path, 80 times a second
            return file.read()
    except OSError:
        return ""


def state(pid: int) -> str:
    """The kernel's letter for the process: R S D T t Z X; empty if it is gone."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = os.read(descriptor, 256)  # a third of the time that a file of Python's takes
    except OSError:  # it has gone meanwhile
        return ""
    finally:
        os.close(descriptor)
    after = text.rfind(b")")
    return chr(text[after + 2]) if after > 0 and len(text) > after + 2 else ""


def thread_states(pid: int) -> dict[int, str]:
    """The kernel's letter for each of its threads; the main thread's is read last."""
    found: dict[int, str] = {}
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for name in sorted(names, key=lambda name: name == str(pid)):
        text = read(f"/proc/{pid}/task/{name}/stat")
        after = text.rfind(")")
        found[int(name)] = text[after + 2] if after > 0 and len(text) > after + 2 else ""
    return found


def wchan(pid: int) -> str:
    """The kernel function its main thread sleeps in."""
    text = read(f"/proc/{pid}/wchan").strip()
    return "" if text == "0" else text


def times(pid: int) -> Times | None:
    """Its processor time so far."""
    text = read(f"/proc/{pid}/stat")
    after = text.rfind(")")
    if after < 0:
        return None
    fields = text[after + 2 :].split()
    run = read(f"/proc/{pid}/task/{pid}/schedstat").split()
    main, waited = (int(run[0]) / 1e9, int(run[1]) / 1e9) if len(run) >= 2 else (0.0, 0.0)
    return Times(time.monotonic(), (int(fields[11]) + int(fields[12])) * _TICK_S, main, waited)


def switches(pid: int) -> int:
    """How often its main thread has left a core, of itself or not."""
    found = re.findall(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)", read(f"/proc/{pid}/status"), re.M)
    return sum(map(int, found))


def shares(before: Times | None, after: Times | None) -> tuple[float, float, float]:
    """(process, main thread, main thread's wait for a core) as shares of the time between."""
    if before is None or after is None or after.at_s <= before.at_s:
        return 0.0, 0.0, 0.0
    span = after.at_s - before.at_s
    waited = (after.main_waited_s - before.main_waited_s) / span
    return (
        (after.process_s - before.process_s) / span,
        (after.main_s - before.main_s) / span,
        min(1.0, max(0.0, waited)),
    )


def catches(pid: int, signum: int) -> bool | None:
    """Whether the process has a handler for the signal: it may die of it otherwise; None where that cannot be told."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)", read(f"/proc/{pid}/status"), re.M)
    return bool(int(found[1], 16) >> (signum - 1) & 1) if found else None


def started(pid: int) -> int:
    """When it was started, in the kernel's ticks since the host came up; with its pid this names it for good. 0 if it is gone."""
    text = read(f"/proc/{pid}/stat")
    after = text.rfind(")")
    return int(text[after + 2 :].split()[19]) if after > 0 and text[after + 2] not in "ZX" else 0


def tracer(pid: int) -> str:
    """The command that traces it, if any."""
    found = re.search(r"^TracerPid:\s*(\d+)", read(f"/proc/{pid}/status"), re.M)
    return read(f"/proc/{found[1]}/comm").strip() if found and found[1] != "0" else ""


def parent(pid: int) -> int:
    """The pid of its parent, 0 if it is gone."""
    text = read(f"/proc/{pid}/stat")
    after = text.rfind(")")
    return int(text[after + 2 :].split()[1]) if after > 0 else 0


def children(pid: int) -> list[int]:
    """The pids of its children."""
    found: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for task in tasks:
        found += [int(p) for p in read(f"/proc/{pid}/task/{task}/children").split()]
    return sorted(found)


def command(pid: int) -> str:
    """Its command line, at most 200 characters."""
    return read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()[:200]


def environment(pid: int, name: str) -> str:
    """A variable of its environment as it was started."""
    for part in read(f"/proc/{pid}/environ").split("\0"):
        if part.startswith(name + "="):
            return part[len(name) + 1 :]
    return ""


def of_run(run_dir: Path) -> list[int]:
    """The live processes of this host that were started for a run: its ranks and what came from them, not its launcher."""
    wanted = str(run_dir.resolve())
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    return [
        p for p in pids if environment(p, "ALLRANKS_RUN_DIR") == wanted and state(p) not in ("", "Z", "X")
    ]


def files_for_writing(pid: int) -> tuple[str, ...]:
    """Regular files it has open for writing, without logs of ours and devices."""
    found: list[str] = []
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return ()
    for number in numbers:
        try:
            path = os.readlink(f"{folder}/{number}")
        except OSError:
            continue
        if (
            not path.startswith("/")
            or path.startswith(("/dev/", "/proc/", "/memfd:"))
            or path.endswith(" (deleted)")
        ):
            continue
        flags = re.search(r"^flags:\s*(\d+)", read(f"/proc/{pid}/fdinfo/{number}"), re.M)
        if flags and int(flags[1], 8) & _WRITING:
            found.append(path)
    return tuple(sorted(set(found)))


def has_open(path: str) -> int | None:
    """A process that has this file open; looks through all of /proc."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            numbers = os.listdir(f"/proc/{name}/fd")
        except OSError:
            continue
        for number in numbers:
            try:
                if os.readlink(f"/proc/{name}/fd/{number}") == path:
                    return int(name)
            except OSError:
                continue
    return None


def flock_waited_for(pid: int) -> tuple[str, int] | None:
    """(path or inode, pid of the owner) of a file lock that the process waits for."""
    held: dict[str, int] = {}
    for line in read("/proc/locks").splitlines():
        fields = line.split()
        if "->" in fields:
            number, owner, inode = fields[0], int(fields[5]), fields[6]
            if owner == pid:
                return _path_of_inode(pid, inode), held.get(number, 0)
        elif len(fields) > 5:
            held[fields[0]] = int(fields[4])
    return None


def _path_of_inode(pid: int, device_and_inode: str) -> str:
    inode = int(device_and_inode.rsplit(":", 1)[-1])
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            if os.stat(f"/proc/{pid}/fd/{number}").st_ino == inode:
                return os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        pass
    return f"inode {inode}"


def sockets(pid: int) -> tuple[Socket, ...]:
    """Its established TCP connections that leave the host; 5 ms, so only on suspicion."""
    own = _socket_inodes(pid)
    found: list[Socket] = []
    for name, is_v6 in (("tcp", False), ("tcp6", True)):
        for line in read(f"/proc/{pid}/net/{name}").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _ESTABLISHED or fields[9] not in own:
                continue
            peer = _address(fields[2], is_v6)
            if not peer.startswith(("127.", "[::1]", "::1")):
                queue, own_address = int(fields[4].split(":")[0], 16), _address(fields[1], is_v6)
                found.append(Socket(peer, queue, int(fields[6], 16), own_address))
    return tuple(found)


def listener(port: int) -> int | None:
    """The process that listens on a TCP port of this host."""
    for name in ("tcp", "tcp6"):
        for line in read(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                return has_open(f"socket:[{fields[9]}]")
    return None


def _socket_inodes(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass
    return found


def _address(text: str, is_v6: bool) -> str:
    """'0200A8C0:1F90' as '192.168.0.2:8080'."""
    raw, port = text.split(":")
    data = bytes.fromhex(raw)
    words = [data[i : i + 4][::-1] for i in range(0, len(data), 4)]
    if is_v6 and b"".join(words[:3]) != b"\0" * 10 + b"\xff\xff":
        import socket

        return f"[{socket.inet_ntop(socket.AF_INET6, b''.join(words))}]:{int(port, 16)}"
    return ".".join(str(b) for b in words[-1]) + f":{int(port, 16)}"


def file_system(path: str) -> str:
    """The kind of the file system that holds a path, 'ext4', 'nfs4'; empty if that is not known."""
    best, kind = "", ""
    for line in read("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, point = after.split(), before.split()[4] if len(before.split()) > 4 else ""
        inside = point == "/" or path == point or path.startswith(point + "/")
        if point and fields and inside and len(point) >= len(best):
            best, kind = point, fields[0]
    return kind


def oom_kills() -> int:
    """Processes that the kernel killed for memory so far: of our memory cgroup if it counts them, else of this host."""
    for text in (read(f"{_memory_group()}/memory.events"), read(f"{_memory_group()}/memory.oom_control")):
        if found := re.search(r"^oom_kill (\d+)", text, re.M):
            return int(found[1])
    found = re.search(r"^oom_kill (\d+)", read("/proc/vmstat"), re.M)
    return int(found[1]) if found else 0


def memory_limit_and_peak() -> tuple[int | None, int | None]:
    """(limit, peak) of our memory cgroup, in bytes."""
    group = _memory_group()
    limit = _number(read(f"{group}/memory.max") or read(f"{group}/memory.limit_in_bytes"))
    peak = _number(read(f"{group}/memory.peak") or read(f"{group}/memory.max_usage_in_bytes"))
    return (None if limit is not None and limit > 1 << 60 else limit), peak


def _memory_group() -> str:
    for line in read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("memory", ""):
            for root in _MEMORY_GROUPS:
                folder = root + path.rstrip("/")
                if Path(folder, "memory.events").exists() or Path(folder, "memory.oom_control").exists():
                    return folder
    return "/sys/fs/cgroup"


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def space(path: str) -> tuple[int | None, int | None]:
    """(size, free bytes) of the file system that holds a path."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
