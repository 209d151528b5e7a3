"""Which bytes of a rank's output are shown, and in what form?

Pure filters between what a rank printed and the console: `AsIs` for rank 0, `Prefixed` for --show-ranks. A traceback that ends the rank
is told once, by the story; so `AsIs` holds a traceback back for a moment, until it is known whether the rank survives it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HOLD_S = 1.5
"""A traceback is held so long: the interpreter's way out after it took 0.1-1 s with torch 2.13 and gloo."""
MAX_LINE_BYTES = 16 << 20
IDLE_S = 1.0
REDRAW_S = 1.0

_TRACEBACK = re.compile(
    rb"^(\[rank\d+\]: ?)?(Traceback \(most recent call last\):|  \+ Exception Group Traceback)", re.M
)


@dataclass(slots=True)
class AsIs:
    """Bytes as they come, except for a traceback, which waits until it is old (or dropped when the rank failed)."""

    hold: bool = True
    _held: bytearray = field(default_factory=bytearray)
    _held_at: float = 0.0
    _line: bytearray = field(default_factory=bytearray)
    """The unfinished line so far, at most a few bytes: has the traceback's first words been cut in two?"""

    def feed(self, data: bytes, now: float) -> bytes:
        """The bytes to show now."""
        if not self.hold:
            return data
        if self._held:
            self._held += data
            return self.tick(now)
        whole = bytes(self._line) + data
        found = _TRACEBACK.search(whole)
        if found is None:
            self._line = bytearray(whole[whole.rfind(b"\n") + 1 :][:80])
            return data
        start = found.start() - len(self._line)
        if start < 0:
            start = 0  # its first words are out already
        self._line.clear()
        self._held, self._held_at = bytearray(data[start:]), now
        return data[:start]

    def tick(self, now: float) -> bytes:
        """What has been held for long enough."""
        if self._held and now - self._held_at >= HOLD_S:
            return self.release()
        return b""

    def release(self) -> bytes:
        """All that is held: the rank survived."""
        held, self._held = bytes(self._held), bytearray()
        return held


@dataclass(slots=True)
class Prefixed:
    """Whole lines, each with its rank in front; a progress bar's redraws at most once a second."""

    prefix: bytes
    _line: bytearray = field(default_factory=bytearray)
    _touched_at: float = 0.0
    _redrawn_at: float = -1e9

    def feed(self, data: bytes, now: float) -> bytes:
        """The whole lines to show now, with prefixes."""
        self._line += data
        self._touched_at = now
        if b"\n" not in data and b"\r" not in data:
            return self._cut_giant()
        *done, rest = bytes(self._line).split(b"\n")
        out = [self._finish(line) for line in done]
        last_redraw = rest.rfind(b"\r")
        if last_redraw >= 0 and last_redraw < len(rest) - 1:
            if now - self._redrawn_at >= REDRAW_S:
                self._redrawn_at = now
                out.append(self._finish(rest[:last_redraw]))
            rest = rest[last_redraw + 1 :]
        self._line = bytearray(rest)
        return b"".join(out) + self._cut_giant()

    def tick(self, now: float) -> bytes:
        """An unfinished line that has not moved for a second, such as a question."""
        if self._line and now - self._touched_at >= IDLE_S:
            return self.release()
        return b""

    def release(self) -> bytes:
        """The unfinished line, finished."""
        line, self._line = bytes(self._line), bytearray()
        return self._finish(line) if line else b""

    def _finish(self, line: bytes) -> bytes:
        """The line as it would look in the end: what a redraw has overwritten is gone."""
        shown = line.rstrip(b"\r").rpartition(b"\r")[2]
        return self.prefix + shown + b"\n" if shown or not line else b""

    def _cut_giant(self) -> bytes:
        if len(self._line) <= MAX_LINE_BYTES:
            return b""
        return self.release()


@dataclass(slots=True)
class Tail:
    """The end of what a rank printed, for its story."""

    limit_bytes: int = 1 << 17
    _data: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        self._data += data[-self.limit_bytes :]
        if len(self._data) > 2 * self.limit_bytes:
            del self._data[: -self.limit_bytes]

    def lines(self) -> tuple[str, ...]:
        """Without line ends; what a progress bar overwrote is left out, control characters are shown as escapes."""
        text = bytes(self._data[-self.limit_bytes :]).decode("utf-8", "backslashreplace")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        if lines and not lines[-1]:
            lines.pop()
        return tuple(_printable(line) for line in lines)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def _printable(line: str) -> str:
    line = _COLOR.sub("", line)
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}", line[:4000])
