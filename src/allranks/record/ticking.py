"""Can this process still take its GIL? A daemon thread that counts ten times a second, and answers when asked.

A count that stands still while the process lives means: the GIL is held in C, or the process is stopped.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from _thread import allocate_lock
from pathlib import Path
from time import monotonic_ns
from typing import Any

from allranks.core.cores import stand_back
from allranks.record import compat, frames, process, states
from allranks.record import layout as at
from allranks.record.light import STALE_NS, phase_on
from allranks.record.lines import describe, user_frame

EVERY_S = 0.1
_SWEEP_EVERY = 100  # ticks
_KEEP_DEAD_S = 60  # pages of children that have ended: time for the agent to read them
_stop: Any = None
"""A lock that is held while the thread ticks: to wait for it costs a tenth of what an Event's wait does, ten times a second."""

_answering: threading.Thread | None = None


def start() -> None:
    """Start ticking, once per process; ends with the interpreter."""
    global _stop
    if _stop is not None:
        return
    _stop = allocate_lock()
    _stop.acquire()
    thread = threading.Thread(target=_tick, args=(_stop,), name="allranks-record", daemon=True)
    thread.start()
    atexit.register(stop, thread)


def stop(thread: threading.Thread | None = None) -> None:
    """End the thread; the last times are kept."""
    global _stop
    if _stop is not None:
        _stop.release()
        _stop = None
    if thread is not None:
        process.WRITER.flush()
        # A daemon that runs on while the interpreter is taken apart may crash it.
        for one in (thread, _answering):
            if one is not None:
                one.join(0.5)


def _forget() -> None:
    global _stop, _answering
    _stop = _answering = None  # a forked child has no such threads


process.AFTER_FORK.append(_forget)


def _tick(stop: Any) -> None:
    stand_back()
    writer, ticks, seen = process.WRITER, 0, (-1, 0)
    while not stop.acquire(timeout=EVERY_S):
        ticks += 1
        words = writer.words
        words[at.W_TICK_NS] = monotonic_ns()
        words[at.W_TICKS] = ticks
        if writer.light.is_on:
            seen = _look_at_light(seen)
        if words[at.W_SAMPLE_UNTIL_NS]:
            _sample()
        writer.flush()
        if states.world is not None:
            words[at.W_GROUP_SEQ] = compat.sequence_number(states.world)
        if words[at.W_ASK] > words[at.W_ANSWERED]:
            _answer_aside(words[at.W_ASK])
        if ticks % _SWEEP_EVERY == 0:
            _sweep()


def _look_at_light(seen: tuple[int, int]) -> tuple[int, int]:
    """What light marks have counted goes into the page. Those of a step that is the same as a tick ago are whole from now on.

    Args:
        seen: The step that was seen last, and when.
    """
    writer, light, words, now = process.WRITER, process.WRITER.light, process.WRITER.words, monotonic_ns()
    frame = sys._current_frames().get(writer.owner)
    if light.step == seen[0]:
        writer.end_light(max(seen[1], words[at.W_SINCE_NS]), frame)
        # Steps that are no longer quick are looked at from the next one on, not only when the next of the quick ones was due.
        writer.next_looked = writer.next_timed = min(writer.next_timed, light.step + 2)
    elif now - words[at.W_SINCE_NS] > STALE_NS:  # else steps that become slower look like a long phase
        writer.end_light(now, frame)
    else:
        phase, mark = phase_on(frame)
        if mark is None:
            user = user_frame(frame)
            words[at.W_SEEN] = phase | (
                writer.seen(describe(user.f_code, user.f_lineno)) << 8 if user is not None else 0
            )
        else:
            words[at.W_SEEN] = light.data_key if phase == at.DATA else phase | process.LINES.of(mark.f_back)
        words[at.LOADER + at.L_DRAWN], words[at.W_MICRO_STEP] = light.drawn, light.micro_steps
    return light.step, now


def _sample() -> None:
    """One more line of the thread that trains, while they are asked for."""
    writer, words = process.WRITER, process.WRITER.words
    if words[at.W_SAMPLE_UNTIL_NS] < monotonic_ns():
        words[at.W_SAMPLE_UNTIL_NS] = words[at.W_NUM_SAMPLED] = 0
        return
    if not writer.has_room:  # names that others need are not pushed out by any line that is passed
        return
    frame = sys._current_frames().get(writer.owner)
    phase = phase_on(frame)[0] if writer.light.is_on else words[at.W_PHASE] & 0xFF
    number = words[at.W_NUM_SAMPLED]
    words[at.SAMPLED + number % at.NUM_SAMPLED] = phase | process.LINES.of(frame)
    words[at.W_NUM_SAMPLED] = number + 1


def _answer_aside(number: int) -> None:
    """Answer on a thread of its own: torch may never return from a dump (pytorch/pytorch#179313)."""
    global _answering
    if _answering is None or not _answering.is_alive():
        _answering = threading.Thread(target=_answer, args=(number,), name="allranks-answer", daemon=True)
        _answering.start()


def _answer(number: int) -> None:
    """Write `<pid>.fr.json`: flight-recorder entries, and the parameter whose gradient came last."""
    path = process.side_path(at.ENTRIES_SUFFIX)
    if path is None:
        return
    writer = process.WRITER
    if writer.words[at.W_PHASE] & 0xFF == at.BACKWARD:
        names = [name for ddp in states.known_replicas() if (name := compat.last_gradient(ddp))]
        writer.words[at.W_LAST_GRAD] = writer.string(names[-1]) if names else 0
    found = {source: _parsed(text) for source, text in compat.flight_entries()}
    making = Path(f"{path}.new")
    said = {"answer": number, "rank": writer.words[at.W_RANK], "stacks": frames.stacks()}
    try:
        making.write_text(json.dumps({**said, **found}))
        making.replace(path)
    except OSError:
        return
    writer.words[at.W_ANSWERED] = number


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _sweep() -> None:
    """Remove the pages of our own dead children: every epoch may start new loader workers."""
    if process.WRITER.path is None:
        return
    from allranks.record.page import NotARecord, PageReader

    folder, now = Path(process.WRITER.path).parent, monotonic_ns()
    for path in folder.glob(f"*{at.SUFFIX}"):
        pid = int(path.stem) if path.stem.isdigit() else 0
        if not pid or pid == os.getpid() or Path(f"/proc/{pid}").exists():
            continue
        try:
            with PageReader(path) as page:
                last = page.read()
        except (OSError, NotARecord):
            continue
        if last.parent_pid == os.getpid() and now - last.phase_since_ns > _KEEP_DEAD_S * 1_000_000_000:
            for suffix in at.ALL_SUFFIXES:
                path.with_suffix(suffix).unlink(missing_ok=True)
