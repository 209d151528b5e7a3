"""How is output written without ever holding who printed it?

A sink is a thread with a bounded queue before a file descriptor. A terminal that is stopped, a pager that is not read, a full disk
or a dead NFS server fill the queue and then cost output, said with its size, but no rank waits for them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from pathlib import Path

LIMIT_BYTES = 64 << 20


class Sink:
    """Writes to one file descriptor in the background, in order.

    Args:
        fd: Where to write; closed at the end if `owned`.
        limit_bytes: What may wait in memory before output is dropped.
    """

    def __init__(
        self, fd: int, *, name: str = "output", owned: bool = False, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.fd, self.name, self.limit_bytes, self.owned = fd, name, limit_bytes, owned
        self.is_broken = False
        """Whether a write has failed: what follows is dropped."""
        self.reader_is_gone = False
        """Whether it failed because nobody reads any more, rather than for a full disk."""
        self._queue: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._closing = False
        self._busy = False
        self._ends_line = True
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"allranks-{name}", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Queue bytes as they are; never blocks."""
        if not data:
            return
        with self._change:
            if self.is_broken or self._closing:
                return
            if self._waiting_bytes + len(data) > self.limit_bytes:
                self._dropped_bytes += len(data)
                return
            if self._dropped_bytes:
                self._push(
                    f"\n[allranks: {self._dropped_bytes} bytes of {self.name} left out: not read in time]\n".encode()
                )
                self._dropped_bytes = 0
            self._push(data)
            self._change.notify()

    def line(self, text: str) -> None:
        """Queue a message of ours, on lines of its own."""
        with self._change:
            start = b"" if self._ends_line else b"\n"
        self.write(start + text.encode("utf-8", "backslashreplace") + b"\n")

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is written, at most so long."""
        with self._change:
            return self._change.wait_for(
                lambda: (not self._queue and not self._busy) or self.is_broken, timeout_s
            )

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most so long, and end the thread (a blocked write is left to the daemon thread)."""
        with self._change:
            if self._dropped_bytes and not self.is_broken:
                self._push(
                    f"\n[allranks: {self._dropped_bytes} bytes of {self.name} left out: not read in time]\n".encode()
                )
                self._dropped_bytes = 0
            self._closing = True
            self._change.notify()
        self._thread.join(timeout_s)
        if self.owned and not self._thread.is_alive():
            with contextlib.suppress(OSError):
                os.close(self.fd)

    def _push(self, data: bytes) -> None:
        self._queue.append(data)
        self._waiting_bytes += len(data)
        self._ends_line = data.endswith((b"\n", b"\r"))

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                data = b"".join(self._queue)
                self._queue.clear()
                self._busy = True
            error = _write_all(self.fd, data)
            with self._change:
                self._busy = False
                self._waiting_bytes -= len(data)
                if error:
                    self.is_broken, self.reader_is_gone = True, error in (errno.EPIPE, errno.EIO)
                    self._queue.clear()
                self._change.notify_all()


def open_log(path: Path) -> Sink:
    """A sink that appends to a file, made with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    return Sink(fd, name=path.name, owned=True)


def _write_all(fd: int, data: bytes) -> int:
    """Write everything; the error number if it cannot be (reader gone, disk full), else 0."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # the user's stdout may be non-blocking, shared with another program
            _wait_writable(fd)
        except InterruptedError:
            continue
        except OSError as error:
            return error.errno or errno.EIO
    return 0


def _wait_writable(fd: int) -> None:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll(1000)
