"""Which lines do a stack dump or a traceback name, and which of them are the user's?

Reads what faulthandler and py-spy write about running threads, and the traceback a dying script printed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from allranks.watch.evidence import Failure, Stack
from allranks.watch.verdict import Place

_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*?)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_FATAL = re.compile(r"^(?:Fatal Python error|Windows fatal exception): (.*)$")
_TRACE_FRAME = re.compile(r'^\s+File "(.*)", line (\d+)(?:, in (.*))?$')
_TRACE_END = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|^<frozen|/allranks/(?:record|watch|run|core|train|wrap|comm|ckpt|metrics)/|^<string>$"
)
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_NOT_FOREIGN = re.compile(r"site-packages/(?:torch|torchdata|allranks)/")
_TRACEBACK_HEAD = "Traceback (most recent call last):"
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")


def parse_faulthandler(text: str) -> tuple[str, tuple[Stack, ...]]:
    """What faulthandler wrote last: the reason of a crash ('Aborted'; empty for a dump on demand), and every thread.

    faulthandler names no main thread; it writes threads newest first, so the last one is the main thread.
    """
    reason, stacks = "", []
    frames: list[Place] = []
    name, seen = "", False
    for line in text.splitlines():
        if fatal := _FATAL.match(line):
            reason, stacks, seen = fatal[1], [], False
        elif thread := _THREAD.match(line):
            if seen:
                stacks.append(Stack(tuple(frames), name))
            frames, name, seen = [], thread[3] or thread[2], True
        elif (frame := _FRAME.match(line)) and seen and frame[2] != "???":
            frames.append(Place(frame[1], int(frame[2]), frame[3]))
        elif seen and not line.strip():
            stacks.append(Stack(tuple(frames), name))
            seen = False
    if seen:
        stacks.append(Stack(tuple(frames), name))
    if stacks:
        stacks[-1] = replace(stacks[-1], is_main=True)
    return reason, tuple(stacks)


def parse_pyspy(text: str) -> tuple[Stack, ...]:
    """The threads of one process in what `py-spy dump --json` printed."""
    try:
        threads = json.loads(text)
    except ValueError:
        return ()
    stacks = []
    for thread in threads:
        frames = tuple(  # py-spy 0.4 says "Module._call_impl" and "mark.<locals>.marked", faulthandler only the last part
            Place(f["filename"], int(f["line"]), f["name"].rpartition(".")[2])
            for f in thread.get("frames", ())
        )
        is_main = thread.get("os_thread_id") == thread.get("pid") or thread.get("thread_name") == "MainThread"
        stacks.append(Stack(frames, str(thread.get("thread_name") or thread.get("thread_id", "")), is_main))
    return tuple(stacks)


def parse_traceback(lines: Sequence[str]) -> Failure | None:
    """The last traceback in these lines of output, if there is one."""
    clean = [_RANK_PREFIX.sub("", line) for line in lines]
    heads = [i for i, line in enumerate(clean) if line.strip() == _TRACEBACK_HEAD]
    blocks = [block for i in heads if (block := _block(clean, lines, i)) is not None]
    if not blocks:
        return None
    first = last = blocks[-1]
    for block in reversed(blocks[:-1]):
        if not any(c in line for line in clean[block[1] : first[0]] for c in _CHAINS):
            break
        first = block
    failure = last[2]
    if first is not last:
        cause = first[2]
        failure = replace(failure, cause=f"{cause.kind}: {cause.message}" if cause.message else cause.kind)
        if not user_frames(failure.frames) and user_frames(cause.frames):
            failure = replace(failure, frames=cause.frames)
    return replace(failure, text=without_ours(clean[first[0] : last[1]]))


def _block(lines: Sequence[str], raw: Sequence[str], head: int) -> tuple[int, int, Failure] | None:
    """(first line, line after the last, the exception) of the traceback that begins at `head`."""
    indent = len(lines[head]) - len(lines[head].lstrip())
    frames: list[Place] = []
    for i in range(head + 1, len(lines)):
        line = lines[i][indent:]
        if frame := _TRACE_FRAME.match(line):
            code = lines[i + 1].strip() if i + 1 < len(lines) and not _TRACE_FRAME.match(lines[i + 1]) else ""
            frames.append(Place(frame[1], int(frame[2]), frame[3] or "", code))
        elif line and not line[0].isspace():
            if not frames or not (end := _TRACE_END.match(line)):
                return None
            stop, message = i + 1, end[2] or ""
            is_marked = bool(
                _RANK_PREFIX.match(raw[i])
            )  # torch's excepthook marks every line: the end is known
            while stop < len(lines) and _continues(lines[stop], raw[stop], stop - i, is_marked):
                message += "\n" + lines[stop][indent:]
                stop += 1
            kind = end[1].rsplit(".", 1)[-1]
            return head, stop, Failure(kind, message.strip(), tuple(reversed(frames)))
    return None


def _continues(line: str, raw: str, offset: int, is_marked: bool) -> bool:
    """Whether a line after 'Kind: message' still belongs to that message (it may have several lines)."""
    if is_marked:
        return bool(_RANK_PREFIX.match(raw)) and line.strip() != _TRACEBACK_HEAD
    ends = line.startswith((_TRACEBACK_HEAD, "[", "terminate called", "Fatal", "Exception ignored"))
    return offset < 60 and bool(line.strip()) and not ends and (offset < 12 or line[0].isspace())


def without_ours(lines: Sequence[str]) -> tuple[str, ...]:
    """A traceback without the frames of the record, which only pass a call on."""
    out: list[str] = []
    skips = False
    for line in lines:
        if frame := _TRACE_FRAME.match(line):
            skips = "/allranks/record/" in frame[1]
        elif line and not line[0].isspace():
            skips = False
        if not skips:
            out.append(line)
    return tuple(out)


def is_library(file: str) -> bool:
    """Whether a file is Python's, an installed package's, or ours: not what the user would call their code."""
    return file.startswith(_OURS) or bool(_LIBRARY.search(file))


def user_frames(frames: Iterable[Place]) -> tuple[Place, ...]:
    """Those frames that are in the user's own files, innermost first."""
    return tuple(f for f in frames if not is_library(f.file))


def user_place(frames: Sequence[Place]) -> Place | None:
    """The innermost line of the user's; else the outermost of a package that is neither torch's nor Python's."""
    own = user_frames(frames)
    if own:
        return own[0]
    foreign = [f for f in frames if "site-packages/" in f.file and not _NOT_FOREIGN.search(f.file)]
    return foreign[0] if foreign else None


def main_stack(stacks: Sequence[Stack]) -> Stack | None:
    """The main thread's."""
    return next((s for s in stacks if s.is_main), stacks[-1] if stacks else None)


def runs_model(stack: Stack) -> bool:
    """Whether the thread is inside a torch module."""
    return any(f.function == "_call_impl" and f.file.endswith("/nn/modules/module.py") for f in stack.frames)


def is_inside(frames: Iterable[Place], file_end: str, *functions: str) -> bool:
    """Whether a frame is in a file that ends so (and in one of these functions, if any are given)."""
    return any(f.file.endswith(file_end) and (not functions or f.function in functions) for f in frames)


def shown(place: Place | None, cwd: str = "") -> Place | None:
    """The place with its file as the user would write it: relative to where the job was started."""
    if place is None or not cwd or not place.file.startswith(cwd.rstrip("/") + "/"):
        return place
    return replace(place, file=place.file[len(cwd.rstrip("/")) + 1 :])
