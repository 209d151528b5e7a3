"""Where do this process's threads stand? Asked of Python itself, under its lock: safe while they run, where a signal's dump is not.

It is what a rank that computes can be asked for where no tool may read it from outside; while the lock is held in C there is no answer.
"""

from __future__ import annotations

import sys
import threading

MOST_FRAMES = 64


def stacks() -> list[list[object]]:
    """[name of the thread, whether it is the main one, [[file, line, function], ...]] of each thread, innermost frame first."""
    names = {t.ident: t.name for t in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    found: list[list[object]] = []
    for ident, top in sys._current_frames().items():
        if ident == own:
            continue
        frames: list[list[object]] = []
        frame = top
        while frame is not None and len(frames) < MOST_FRAMES:
            frames.append([frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name])
            frame = frame.f_back
        found.append([names.get(ident, str(ident)), ident == main, frames])
    return found
