"""Where does what the ranks print go?

rank --pipe or pty--> reader thread --> RUN/ranks/rankN.log, its tail in memory, and (if shown) the console, each through a sink.
The reader never waits for anything but the ranks, so no rank ever waits for a slow reader.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from allranks.run.lines import AsIs, Prefixed, Tail
from allranks.run.sinks import Sink, open_log

CHUNK = 1 << 18


@dataclass(slots=True)
class _Stream:
    """One end that is read."""

    fd: int
    rank: int
    form: AsIs | Prefixed | None
    """None: in the log only."""
    target: Sink | None


@dataclass(slots=True)
class _Rank:
    log: Sink
    path: Path
    tail: Tail = field(default_factory=Tail)
    streams: list[_Stream] = field(default_factory=list)
    muted: bool = False


class Console:
    """Our own stdout and stderr, shared by the ranks that are shown and by the agent's words."""

    def __init__(self, out_fd: int = 1, err_fd: int = 2) -> None:
        self.same = _same_file(out_fd, err_fd)
        self.out = Sink(out_fd, name="stdout")
        self.err = self.out if self.same else Sink(err_fd, name="stderr")
        self.out_is_tty, self.err_is_tty = os.isatty(out_fd), os.isatty(err_fd)
        self.color = self.err_is_tty and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def say(self, text: str) -> None:
        """A line of the agent's, on stderr."""
        self.err.line(text)

    @property
    def reader_is_gone(self) -> bool:
        """Whether nobody reads our output any more."""
        return self.out.reader_is_gone or self.err.reader_is_gone

    def close(self) -> None:
        """Write what waits."""
        for sink in {id(self.out): self.out, id(self.err): self.err}.values():
            sink.close()


class Output:
    """Reads all ranks of one attempt on this node.

    Args:
        console: Where shown ranks appear.
        folder: RUN/ranks.
    """

    def __init__(self, console: Console, folder: Path) -> None:
        self.console, self.folder = console, folder
        self._ranks: dict[int, _Rank] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._closing = False
        self._pass = 0
        self._passed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="allranks-output", daemon=True)
        self._thread.start()

    def open(self, rank: int, *, shown: str, restart: int, prefix: str) -> tuple[int, int]:
        """Ends for a rank's stdout and stderr; close them (`close_ends`) once it is started.

        Args:
            shown: "as-is", "prefixed" or "" (log only).
        """
        name = f"rank{rank}.log" if restart == 0 else f"rank{rank}.{restart}.log"
        held = _Rank(open_log(self.folder / name), self.folder / name)
        ends: list[int] = []
        one_pipe = not shown or self.console.same  # one pipe keeps the order of the two streams
        for is_err in (False,) if one_pipe else (False, True):
            is_tty = self.console.err_is_tty if is_err else self.console.out_is_tty
            ours, theirs = _open_pty() if shown == "as-is" and is_tty else _open_pipe()
            target = (self.console.err if is_err else self.console.out) if shown else None
            form = Prefixed(prefix.encode()) if shown == "prefixed" else AsIs(hold=True) if shown else None
            held.streams.append(_Stream(ours, rank, form, target))
            ends.append(theirs)
        with self._lock:
            self._ranks[rank] = held
            for stream in held.streams:
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        self._wake()
        return ends[0], ends[-1]

    def path(self, rank: int) -> Path:
        """The rank's log."""
        return self._ranks[rank].path

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The end of what the rank printed, read after it has ended."""
        self._drain()
        with self._lock:
            return self._ranks[rank].tail.lines()

    def release(self, rank: int, *, drop_held: bool) -> None:
        """The rank has ended: show its unfinished line; a held traceback only if no story will tell it."""
        with self._lock:
            for stream in self._ranks[rank].streams:
                if stream.form and stream.target and not (drop_held and isinstance(stream.form, AsIs)):
                    stream.target.write(stream.form.release())

    def mute(self) -> None:
        """Show no more of the ranks (a story has been told); the logs go on."""
        with self._lock:
            for held in self._ranks.values():
                held.muted = True

    def window_changed(self) -> None:
        """Hand the terminal's new size to the ptys."""
        for held in self._ranks.values():
            for stream in held.streams:
                if os.isatty(stream.fd):
                    _copy_window(1, stream.fd)

    def close(self) -> None:
        """Read what is there, close the logs, end the thread."""
        self._drain()
        self._closing = True
        self._wake()
        self._thread.join(3)
        for held in self._ranks.values():
            held.log.close()
            for stream in held.streams:
                with contextlib.suppress(OSError, KeyError, ValueError):
                    self._selector.unregister(stream.fd)
                with contextlib.suppress(OSError):
                    os.close(stream.fd)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _drain(self, timeout_s: float = 1.0) -> None:
        """Wait until the reader has been through everything that was there when this was called."""
        with self._passed:
            goal = self._pass + 2  # the pass under way may have looked at that pipe already
            deadline = time.monotonic() + timeout_s
            while self._pass < goal and self._thread.is_alive() and time.monotonic() < deadline:
                self._wake()
                self._passed.wait(0.1)

    def _run(self) -> None:
        while not self._closing:
            events = self._selector.select(0.2)
            now = time.monotonic()
            idle = True
            for key, _ in events:
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    idle = self._read(key.data, now) < CHUNK and idle
            with self._passed:
                for held in self._ranks.values():
                    self._show_late(held, now)
                if idle:
                    self._pass += 1
                    self._passed.notify_all()

    def _read(self, stream: _Stream, now: float) -> int:
        parts, size, is_over = [], 0, False
        while size < CHUNK:  # a pty gives 4 kB at a time
            try:
                part = os.read(stream.fd, CHUNK)
            except BlockingIOError:
                break
            except OSError:
                part = b""  # a pty whose last holder is gone says EIO
            if not part:
                is_over = True
                break
            parts.append(part)
            size += len(part)
        data = b"".join(parts)
        with self._lock:
            held = self._ranks[stream.rank]
            if is_over:
                self._selector.unregister(stream.fd)
            held.log.write(data)
            held.tail.feed(data)
            if stream.form is not None and stream.target is not None and not held.muted:
                stream.target.write(stream.form.feed(data, now))
        return size

    def _show_late(self, held: _Rank, now: float) -> None:
        if held.muted:
            return
        for stream in held.streams:
            if stream.form is not None and stream.target is not None:
                stream.target.write(stream.form.tick(now))


def close_ends(ends: tuple[int, int]) -> None:
    """Close the ranks' ends in this process."""
    for fd in set(ends):
        os.close(fd)


def _open_pipe() -> tuple[int, int]:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(
            theirs, fcntl.F_SETPIPE_SZ, 1 << 20
        )  # room for a burst while the reader is at another rank
    return ours, theirs


def _open_pty() -> tuple[int, int]:
    """A terminal for rank 0, so that bars and colours live; it changes no byte (the real terminal adds the carriage returns)."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    _copy_window(1, ours)
    os.set_blocking(ours, False)
    return ours, theirs


def _copy_window(source: int, target: int) -> None:
    import fcntl
    import termios

    with contextlib.suppress(OSError):
        size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(target, termios.TIOCSWINSZ, size)


def _same_file(a: int, b: int) -> bool:
    """Whether two descriptors write to the same place."""
    try:
        one, two = os.fstat(a), os.fstat(b)
    except OSError:
        return False
    return (one.st_dev, one.st_ino, one.st_rdev) == (two.st_dev, two.st_ino, two.st_rdev)


def open_closed_streams() -> None:
    """Give /dev/null to a standard stream that was closed (`>&-`): its number must not become a rank's pipe."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def flush_python_streams() -> None:
    """What Python has buffered for the same descriptors goes first."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:  # closed when Python started
                stream.flush()
