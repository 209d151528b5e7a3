"""How is a process asked where its threads stand, without harm to it and within a given time?

While the job lives, a process that sleeps and can take Python's lock is asked itself, by a word of its page; one that runs, or does not
answer, is read from outside by py-spy, without stopping it. A signal that faulthandler answers takes no lock and 10 ms, but where a thread
wakes up between the look at it and the signal, its frames may be half made, and the process ends (CPython 3.11: a healthy rank that was
starting loader workers on a crowded machine did). So it is for processes whose record has no thread, and for jobs that end anyway.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from allranks.record import page
from allranks.watch import proc
from allranks.watch.evidence import Stack
from allranks.watch.stacks import is_inside, parse_faulthandler, parse_pyspy
from allranks.watch.verdict import Place

ANSWER_S = 0.25
"""For what the processes write when they are signalled."""
OUTSIDE_S = 0.6
"""For one py-spy."""
ITSELF_S = 0.35
"""For the answer of a process that is asked itself: its record's thread looks ten times a second."""
MIN_OUTSIDE_S = 0.05
"""Less is not enough for it."""
MOST_OUTSIDE = 3
"""Times that py-spy reads one process for one evidence: each costs 0.1 s of a core."""
RESERVE_S = 0.2
"""What looks that can be done without leave."""
_CUT_SHORT = ("sys_pause", "sigsuspend")
"""What the kernel calls waits that any signal ends for good."""

Stacks = dict[int, tuple[str, tuple[Stack, ...]]]
"""pid -> (how they were taken, stacks)."""
NO_STACKS: tuple[str, tuple[Stack, ...]] = ("", ())


@dataclass(frozen=True, slots=True)
class Target:
    """A process to take evidence from."""

    pid: int
    page: page.Record | None


class Asker:
    """Asks processes for their stacks until its time is up.

    Args:
        within_s: The time for all that it is asked.
        is_over: A rank has failed, so the job ends: what is quickest will do.
    """

    def __init__(self, within_s: float, *, is_over: bool = False) -> None:
        self._ends_at, self._is_over = time.monotonic() + within_s, is_over
        self._outside: Counter[int] = Counter()

    @property
    def left_s(self) -> float:
        """What is left of its time."""
        return max(0.0, self._ends_at - time.monotonic())

    def stacks(self, targets: Iterable[Target], *, is_extra: bool = False) -> Stacks:
        """By itself or by signal where the process can answer, else by py-spy from outside; those without an answer are left out.

        Args:
            targets: Who is asked.
            is_extra: A look that can be done without: it leaves time, and one reading by py-spy, for those that cannot.
        """
        asked: dict[int, tuple[Path, int]] = {}
        itself: dict[int, page.Record] = {}
        outside: list[Target] = []
        by_pid: dict[int, Target] = {}
        for target in targets:
            if self.left_s <= (RESERVE_S if is_extra else 0.0):
                break
            if proc.state(target.pid) in ("", "Z", "X"):
                continue
            found, by_pid[target.pid] = target.page, target
            if found is None or not _has_handler(found, target.pid):
                outside.append(target)
                continue
            path = page.side_file(found, ".stack")
            size = path.stat().st_size if path.exists() else 0
            if not all_sleep(
                target.pid
            ):  # read last: what is known of a thread grows old within microseconds
                outside.append(target)
                continue
            if not self._is_over and _ticks(found):
                itself[target.pid] = found
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target.pid, found.stack_signal)
                asked[target.pid] = (path, size)
        out = _answers(asked, min(ANSWER_S, self.left_s))
        out |= asked_itself(itself, min(ITSELF_S, self.left_s))
        silent = [by_pid[p] for p in (*asked, *itself) if p not in out]
        return {**out, **self._from_outside([*outside, *silent], is_extra=is_extra)}

    def _from_outside(self, targets: Sequence[Target], *, is_extra: bool) -> Stacks:
        pages = {t.pid: t.page for t in targets if self._outside[t.pid] < MOST_OUTSIDE - is_extra}
        pids = list(pages)
        kept_s = RESERVE_S if is_extra else 0.0
        if not pids or self.left_s - kept_s < MIN_OUTSIDE_S:
            return {}
        self._outside.update(pids)
        with ThreadPoolExecutor(max_workers=8) as pool:
            texts = list(pool.map(lambda pid: py_spy(pid, min(OUTSIDE_S, self.left_s - kept_s)), pids))
        read = {pid: parse_pyspy(text) for pid, text in zip(pids, texts, strict=True) if text}
        found = {pid: ("py-spy", without_ours(stacks)) for pid, stacks in read.items()}
        alone = {p: one for p, one in pages.items() if p not in found and one is not None and _ticks(one)}
        return found | asked_itself(alone, min(ITSELF_S, self.left_s - kept_s))


def _has_handler(found: page.Record, pid: int) -> bool:
    """Whether a signal does no harm: it is handled, and cuts no wait short, such as pause() or a sleep(3) in C code that holds the GIL."""
    is_frozen = found.tick_ns > 0 and time.monotonic_ns() - found.tick_ns > 1_000_000_000
    return (
        not is_frozen
        and not any(call in proc.wchan(pid) for call in _CUT_SHORT)
        and found.stack_signal > 0
        and proc.catches(pid, found.stack_signal) is True
    )


def all_sleep(pid: int) -> bool:
    """Whether no thread of the process runs, and the main thread can take a signal."""
    letters = proc.thread_states(pid)
    return letters.get(pid) == "S" and "R" not in letters.values()


def _answers(asked: dict[int, tuple[Path, int]], within_s: float) -> Stacks:
    """What the processes wrote after the sizes given, once each file has stopped growing."""
    out: Stacks = {}
    sizes = dict.fromkeys(asked, -1)
    deadline = time.monotonic() + within_s
    while len(out) < len(asked) and time.monotonic() < deadline:
        time.sleep(0.004)
        for pid, (path, start) in asked.items():
            if pid in out:
                continue
            size = path.stat().st_size if path.exists() else 0
            if size > start and size == sizes[pid]:
                with path.open("rb") as file:
                    file.seek(start)
                    _, stacks = parse_faulthandler(file.read().decode("utf-8", "replace"))
                out[pid] = ("signal", without_ours(stacks))
            sizes[pid] = size
    return out


def _ticks(found: page.Record) -> bool:
    """Whether the record's own thread came by a moment ago: it can take Python's lock."""
    return found.tick_ns > 0 and time.monotonic_ns() - found.tick_ns < 500_000_000


def asked_itself(pages: dict[int, page.Record], within_s: float) -> Stacks:
    """What processes say of themselves, where py-spy is not there or has no right to read them."""
    numbers: dict[int, int] = {}
    for pid, found in pages.items() if within_s > MIN_OUTSIDE_S else ():
        with contextlib.suppress(OSError):
            numbers[pid] = page.ask(found.path)
    out: Stacks = {}
    deadline = time.monotonic() + within_s
    while len(out) < len(numbers) and time.monotonic() < deadline:
        time.sleep(0.01)
        for pid, number in numbers.items():
            if pid not in out and (stacks := _answer_of(pages[pid], number)) is not None:
                out[pid] = ("itself", without_ours(stacks))
    return {pid: found for pid, found in out.items() if found[1]}


def _answer_of(asked: page.Record, number: int) -> tuple[Stack, ...] | None:
    """The stacks in an answer of this number or a later one; None if there is none yet."""
    try:
        found = json.loads(page.side_file(asked, ".fr.json").read_text(encoding="utf-8"))
        if int(found["answer"]) < number:
            return None
        return tuple(
            Stack(tuple(Place(str(f), int(n), str(w)) for f, n, w in frames), str(name), bool(is_main))
            for name, is_main, frames in found.get("stacks", ())
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def py_spy(pid: int, within_s: float, *options: str) -> str:
    """What py-spy says of a process without stopping it, as JSON; empty if it cannot, or not in time."""
    tool = Path(sys.executable).parent / "py-spy"
    if within_s < MIN_OUTSIDE_S or (found := str(tool) if tool.exists() else shutil.which("py-spy")) is None:
        return ""
    try:
        done = subprocess.run(
            [found, "dump", "--nonblocking", "--json", *options, "--pid", str(pid)],
            capture_output=True,
            timeout=within_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def without_ours(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Without the threads that the record keeps in the process."""
    kept = [
        s
        for s in stacks
        if not (s.frames and not s.is_main and is_inside(s.frames, "/allranks/record/process.py"))
    ]
    return tuple(s for s in kept if s.is_main or not _is_record_thread(s))


def _is_record_thread(stack: Stack) -> bool:
    inner = [f for f in stack.frames if not f.file.endswith("/threading.py")]
    return bool(inner) and all("/allranks/record/" in f.file for f in inner)
