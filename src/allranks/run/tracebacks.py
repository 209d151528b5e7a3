"""What did a rank say when it died? Its last traceback, freed of frames that are not the user's.

Pure text work on the last lines of a rank's log; used by the story.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_START = "Traceback (most recent call last):"
_CHAINS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(, in (?P<function>.+))?')
_NAME = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(: ?(?P<message>.*))?$")
_OTHERS = re.compile(
    r"/torch/distributed/(elastic|run|launcher)|/allranks/(run|record)/|<frozen runpy>|<frozen importlib"
)
_NOISE = re.compile(
    r"^(\[rank\d+\]:)?\[[WIE]\d{4,} |^\[rank\d+\]:\[[WIE]|^[WIE]\d{4} \d\d:|UserWarning:|ResourceWarning:"
)
_BYSTANDERS = re.compile(r"^(Exception ignored in|Error in atexit|Exception in thread|Error in sys\.)")
"""Tracebacks after these lines did not end the process."""
_MAX_MESSAGE_LINES = 15


@dataclass(frozen=True, slots=True)
class Traceback:
    """One exception that nobody caught."""

    lines: tuple[str, ...]
    """As it is shown: frames of launchers left out."""
    type: str
    message: str
    place: str
    """file:line of the innermost frame that is not a library's."""
    function: str = ""

    def identity(self) -> str:
        """What makes two tracebacks the same failure: type, and place; not the message, which may hold addresses and times."""
        return f"{self.type} at {self.place}"


def last_traceback(lines: tuple[str, ...]) -> Traceback | None:
    """The last uncaught traceback in a rank's output; None if there is none.

    With "[rank1]: " in front of its lines (torch's excepthook) its end is known; else the message ends at the first line
    that is a log line, or after 15 lines.
    """
    marked = [bool(_PREFIX.match(line)) for line in lines]
    plain = [_PREFIX.sub("", line) for line in lines]
    starts = [
        i for i, line in enumerate(plain) if line == _START and not (i and _BYSTANDERS.match(plain[i - 1]))
    ]
    if not starts:
        return None
    last = starts[-1]
    end = _end(plain, marked, last)
    if end is None:
        return None
    first = _chain_start(plain, last)
    kept = _own_frames(plain[first:end])
    head = plain[_head(plain, last)]
    name = _NAME.match(head)
    file, line, function = _innermost(plain[last:end])
    message = "\n".join(
        [name["message"] or "" if name else head, *plain[_head(plain, last) + 1 : end]]
    ).strip()
    return Traceback(
        tuple(kept), name["type"] if name else "", message, f"{file}:{line}" if file else "", function
    )


def _head(lines: list[str], start: int) -> int:
    """Index of the line with the exception's type: the first after `start` that is not indented."""
    return next((i for i in range(start + 1, len(lines)) if lines[i][:1] not in (" ", "\t", "")), len(lines))


def _end(lines: list[str], marked: list[bool], start: int) -> int | None:
    head = _head(lines, start)
    if head >= len(lines):
        return None  # cut off in the middle
    end = head + 1
    while end < len(lines) and end - head < _MAX_MESSAGE_LINES:
        if marked[start] != marked[end] or _NOISE.search(lines[end]) or lines[end] in _CHAINS:
            break
        if not marked[start] and not lines[end].strip():
            break
        end += 1
    while end > head + 1 and not lines[end - 1].strip():
        end -= 1
    return end


def _chain_start(lines: list[str], start: int) -> int:
    """The first traceback of a chain of causes that ends with the one at `start`."""
    while True:
        above = start - 1
        while above >= 0 and not lines[above].strip():
            above -= 1
        if above < 0 or lines[above] not in _CHAINS:
            return start
        earlier = [i for i in range(above) if lines[i] == _START]
        if not earlier:
            return start
        start = earlier[-1]


def _own_frames(lines: list[str]) -> list[str]:
    """Without the frames of launchers; all of them if nothing would be left."""
    kept: list[str] = []
    skipping = False
    num_frames = num_kept = 0
    for line in lines:
        frame = _FRAME.match(line)
        if frame:
            num_frames += 1
            skipping = bool(_OTHERS.search(frame["file"]))
            num_kept += not skipping
        elif line[:1] not in (" ", "\t"):
            skipping = False
        if not skipping:
            kept.append(line)
    return kept if num_kept or not num_frames else lines


def _innermost(lines: list[str]) -> tuple[str, str, str]:
    """File, line and function of the deepest frame in the user's own files, else of the deepest."""
    frames = [m for m in map(_FRAME.match, lines) if m]
    own = [
        m
        for m in frames
        if "site-packages" not in m["file"] and "/lib/python" not in m["file"] and m["file"][:1] != "<"
    ]
    chosen = (own or frames)[-1:]
    return (chosen[0]["file"], chosen[0]["line"], chosen[0]["function"] or "") if chosen else ("", "", "")


_CONSEQUENCES = re.compile(
    "|".join(
        (
            r"Connection closed by peer",
            r"Connection reset by peer",
            r"Broken pipe",
            r"Connection refused",
            r"Timed out waiting \d+ ?ms for (recv|send)",
            r"(Read|Write) (error|timeout)",
            r"pair closure|SocketTimeout|Socket Timeout|socket is not connected",
            r"failed to recv, got 0 bytes|failed to (connect|send|recv)",
            r"DistNetworkError|ncclRemoteError|remote process (has )?exited|ncclSystemError",
            r"DistStoreError|wait timeout after|Stop_waiting response",
            r"Watchdog caught collective operation timeout|heartbeat monitor",
            r"gloo.*connectFullMesh|store->get.*got error",
            r"another rank (failed|raised|ended)|ended because rank \d+",
            r"\bAR02[02] ",  # our own: another rank failed first, or left
        )
    ),
    re.I,
)


def is_consequence(text: str) -> bool:
    """Whether an error says no more than that a peer is gone, or does not answer."""
    return bool(_CONSEQUENCES.search(text))
