"""Which processes did the kernel kill because memory ran out? Its own log says so, where we may read it."""

from __future__ import annotations

import os
import re

_KILLED = re.compile(
    r"(?P<why>Memory cgroup out of memory|Out of memory)[^:]*: Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)"
    r".*?anon-rss:(?P<kb>\d+)kB"
)
MAX_BYTES = 4 << 20


def oom_kills() -> dict[int, str]:
    """pid (as this host's first namespace counts) -> 'Memory cgroup out of memory, 1.2 GB of its own'; empty without the right."""
    return parse(_read())


def parse(text: str) -> dict[int, str]:
    """The same from the text of the log."""
    return {int(m["pid"]): f"{m['why']}, it held {int(m['kb']) / 1e6:.2f} GB" for m in _KILLED.finditer(text)}


def _read() -> str:
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    parts: list[bytes] = []
    size = 0
    try:
        while size < MAX_BYTES:
            parts.append(os.read(descriptor, 8192))  # one record each
            size += len(parts[-1])
    except BlockingIOError:
        pass  # all were read
    except OSError:
        pass  # records were written over meanwhile (EPIPE)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("utf-8", "replace")
