"""Can this process still take its GIL? A daemon thread that counts ten times a second (pace.py), and answers when asked.

A count that stands still while the process lives means: the GIL is held in C, or the process is stopped. While quick steps end, it goes on
without the GIL: that they do shows that it is free.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from time import monotonic_ns
from typing import Any

from allranks.core.cores import stand_back
from allranks.record import compat, frames, pace, process, states
from allranks.record import layout as at
from allranks.record.layout import W_ANSWERED, W_ASK, W_SAMPLE_UNTIL_NS, W_SINCE_NS, W_TICK_NS, W_TICKS
from allranks.record.light import STALE_NS, phase_on
from allranks.record.lines import describe, user_frame

_SWEEP_EVERY = 100  # ticks
LOOKED_NS = 700_000_000
"""Of quick steps one is looked at within so long and LIGHT_EVERY ticks: 377 of 1.56 ms, where they stay as quick (layout.next_timed)."""
_KEEP_DEAD_S = 60  # pages of children that have ended: time for the agent to read them
_pace: pace.PlainPace | None = None
"""Of the thread that ticks."""
_answering: threading.Thread | None = None


def start() -> None:
    """Start ticking, once per process; ends with the interpreter."""
    global _pace
    if _pace is not None:
        return
    _pace = pace.new()
    thread = threading.Thread(target=_tick, args=(_pace,), name="allranks-record", daemon=True)
    thread.start()
    atexit.register(stop, thread)


def stop(thread: threading.Thread | None = None) -> None:
    """End the thread; the last times are kept."""
    global _pace
    if _pace is not None:
        _pace.stop()
        _pace = None
    if thread is not None:
        process.WRITER.flush()
        # A daemon that runs on while the interpreter is taken apart may crash it.
        for one in (thread, _answering):
            if one is not None:
                one.join(0.5)


def _forget() -> None:
    global _pace, _answering
    _pace = _answering = None  # a forked child has no such threads


process.AFTER_FORK.append(_forget)


def _tick(paced: pace.PlainPace) -> None:
    stand_back()
    writer, light = process.WRITER, process.WRITER.light
    while paced.wait(light, writer.words):
        words, step, now = writer.words, light.step, monotonic_ns()
        words[W_TICK_NS], words[W_TICKS] = now, paced.ticks
        if words[W_SAMPLE_UNTIL_NS]:
            _sample()
        if words[W_ASK] > words[W_ANSWERED]:
            _answer_aside(words[W_ASK])
        seen = paced.step, paced.ns, paced.ended
        paced.step, paced.ns, paced.ended = _look_at_light(seen) if light.is_on else _look_at_whole(step, now)
        writer.flush()
        if states.world is not None and not light.is_on:  # in quick steps W_STEP_SEQ is as new
            words[at.W_GROUP_SEQ] = compat.sequence_number(states.world)
        if paced.ticks % _SWEEP_EVERY == 0:
            _sweep()


Seen = tuple[int, int, int]
_NOTHING: Seen = -1, 0, 1 << 62  # as a pace begins


def _look_at_light(seen: Seen) -> Seen:
    """What light marks have counted goes into the page. Those of a step that is the same as a tick ago are whole from now on.

    Args:
        seen: The step that was seen last, when, and how many had ended since the tick before. If only half as many have by now, this
            one may be long, and who is killed in it wants to be seen there.
    """
    writer, step, now = process.WRITER, process.WRITER.light.step, monotonic_ns()
    since = writer.words[W_SINCE_NS]
    is_stale = now - max(since, writer.light.asked_ns) > STALE_NS or _is_look_old(now)
    if step == seen[0] or is_stale:  # else steps that become slower look like a long phase
        writer.end_light(max(seen[1], since) if step == seen[0] else now, _frame())
        writer.look_soon()
    else:
        _show_light(_frame())
    return step, now, step - seen[0] if seen[0] >= 0 else 0


def _look_at_whole(step: int, now: int) -> Seen:
    """Where something ends the light marks of each quick step, few are looked at, too: the next one is if this one takes long."""
    writer = process.WRITER
    ended = writer.words[at.STEP_ENDS + step % at.NUM_STEP_ENDS]
    if writer.next_looked > step + 2 and (now - ended > STALE_NS or _is_look_old(now)):
        writer.look_soon()
    return _NOTHING


def _is_look_old(now: int) -> bool:
    """Whether the last step that was looked at is longer ago than one of the quickest is from the next: they have become slower."""
    return 0 < process.WRITER.timed_ns < now - LOOKED_NS


def _frame() -> Any:
    """The innermost frame of the thread that trains."""
    return sys._current_frames().get(process.WRITER.owner)


def _show_light(frame: Any) -> None:
    writer, light, words = process.WRITER, process.WRITER.light, process.WRITER.words
    phase, mark = phase_on(frame)
    if mark is not None:
        words[at.W_SEEN] = light.data_key if phase == at.DATA else phase | process.LINES.of(mark.f_back)
    else:
        user = user_frame(frame)
        place = writer.seen(describe(user.f_code, user.f_lineno)) if user is not None else 0
        words[at.W_SEEN] = phase | place << 8


def _sample() -> None:
    """One more line of the thread that trains, while they are asked for."""
    writer, words = process.WRITER, process.WRITER.words
    if words[at.W_SAMPLE_UNTIL_NS] < monotonic_ns():
        words[at.W_SAMPLE_UNTIL_NS] = words[at.W_NUM_SAMPLED] = 0
        return
    if not writer.has_room:  # names that others need are not pushed out by any line that is passed
        return
    frame = _frame()
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
    """Remove the pages of our own dead children: every epoch may start new loader workers.

    The reader of whole pages is not imported for it: that takes 20 ms, with the GIL.
    """
    if process.WRITER.path is None:
        return
    folder, now, own = Path(process.WRITER.path).parent, monotonic_ns(), os.getpid()
    for name in os.listdir(folder):  # noqa: PTH208 - names are enough
        pid = int(stem) if name.endswith(at.SUFFIX) and (stem := name[: -len(at.SUFFIX)]).isdigit() else own
        if pid == own or os.path.exists(f"/proc/{pid}"):  # noqa: PTH110 - as above
            continue
        path = folder / name
        try:
            words = memoryview(path.read_bytes()).cast("q")
        except (OSError, TypeError):  # gone, or cut short
            continue
        if len(words) != at.WORDS or words[at.W_MAGIC] != at.MAGIC or words[at.W_VERSION] != at.VERSION:
            continue
        if words[at.W_PARENT] == own and now - words[at.W_SINCE_NS] > _KEEP_DEAD_S * 1_000_000_000:
            for suffix in at.ALL_SUFFIXES:
                path.with_suffix(suffix).unlink(missing_ok=True)
