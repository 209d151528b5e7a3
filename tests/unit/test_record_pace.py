"""Is the record's thread woken when there is something to do, and does it say otherwise that it ticks? In Python, and compiled the same."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from allranks.record import counts, pace
from allranks.record import layout as at
from allranks.record.light import Light

SECOND = 10**9
HOUR = 3600 * SECOND
compiled = pytest.mark.skipif(not counts.IS_COMPILED, reason="the extension is not compiled here")
kinds = pytest.mark.parametrize(
    "kind", [pace.PlainPace, pytest.param(pace.Pace, marks=compiled)], ids=["python", "compiled"]
)
Kind = Callable[..., pace.PlainPace]


class Job:
    """Quick steps, of a process with a page. The first tick of its thread is light, and none after it, since no step ends."""

    def __init__(self, kind: Kind, *, light_every: int = 1 << 40, every_us: int = 1000) -> None:
        self.page = mmap.mmap(-1, at.PAGE_BYTES)
        self.words = memoryview(self.page).cast("q")
        self.words[at.W_SINCE_NS] = time.monotonic_ns() + HOUR
        self.light = Light(self.words)
        self.light.is_on = True
        self.pace = kind(every_us, light_every, SECOND, pace.WORDS)
        self.pace.step, self.pace.ended = 0, -1

    def wait(self) -> bool:
        """Until there is something to do."""
        return self.pace.wait(self.light, self.words)


@kinds
def test_tick_when_steps_go_on_then_only_the_page_is_told(kind: Kind) -> None:
    job = Job(kind)
    before = time.monotonic_ns()
    job.light.step, job.pace.ended = job.pace.step + 11, 20
    assert job.wait() and job.pace.ticks == 2
    assert job.words[at.W_TICKS] == 1 and before < job.words[at.W_TICK_NS] < time.monotonic_ns()
    assert (job.pace.step, job.pace.ns, job.pace.ended) == (job.light.step, job.words[at.W_TICK_NS], 11)


@kinds
def test_tick_when_one_of_so_many_then_due_although_steps_go_on(kind: Kind) -> None:
    job = Job(kind, light_every=1)
    assert job.wait() and (job.pace.ticks, job.words[at.W_TICKS]) == (1, 0)


@kinds
def test_tick_when_the_phase_is_old_but_steps_were_quick_just_now_then_not_due(kind: Kind) -> None:
    job = Job(kind)
    _is_old(job)
    job.light.asked_ns = time.monotonic_ns() + HOUR
    assert job.wait() and job.words[at.W_TICKS] == 1


def _ends_light(job: Job) -> None:
    job.light.is_on = False


def _stands(job: Job) -> None:
    job.pace.ended = 0


def _is_slower(job: Job) -> None:
    job.light.step, job.pace.ended = job.pace.step + 10, 20


def _is_old(job: Job) -> None:
    job.words[at.W_SINCE_NS] = time.monotonic_ns() - SECOND


def _is_sampled(job: Job) -> None:
    job.words[at.W_SAMPLE_UNTIL_NS] = 1


def _is_asked(job: Job) -> None:
    job.words[at.W_ASK] = job.words[at.W_ANSWERED] + 1


@kinds
@pytest.mark.parametrize("happens", [_ends_light, _stands, _is_slower, _is_old, _is_sampled, _is_asked])
def test_tick_when_there_is_something_to_do_then_it_is_due_and_says_nothing(
    kind: Kind, happens: Callable[[Job], None]
) -> None:
    job = Job(kind)
    happens(job)
    kept = job.pace.step, job.pace.ns, job.pace.ended
    assert job.wait() and job.pace.ticks == 1
    assert job.words[at.W_TICKS] == job.words[at.W_TICK_NS] == 0
    assert (job.pace.step, job.pace.ns, job.pace.ended) == kept


@kinds
def test_first_tick_then_due(kind: Kind) -> None:
    job = Job(kind)
    job.pace = kind(1000, 1 << 40, SECOND, pace.WORDS)
    assert (job.pace.step, job.pace.ns, job.pace.ended) == (-1, 0, 1 << 62)
    assert job.wait() and job.pace.ticks == 1


@kinds
def test_wait_when_stopped_then_over_at_once_and_for_good(kind: Kind) -> None:
    job = Job(kind, every_us=60_000_000)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(job.wait()))
    thread.start()
    job.pace.stop()
    thread.join(30.0)
    assert not thread.is_alive() and found == [False]
    job.pace.stop()
    assert not job.wait() and job.pace.ticks == 0


def test_wait_in_python_when_the_page_is_given_up_meanwhile_then_due() -> None:
    class GivesUp:
        def acquire(self, *, timeout: float) -> bool:
            job.words.release()
            return False

    job = Job(pace.PlainPace)
    cast(Any, job.pace)._lock = GivesUp()
    assert job.wait() and job.pace.ticks == 1


@pytest.fixture
def waiting() -> Iterator[Job]:
    """A job whose thread waits, compiled, for a tick that does not come."""
    job = Job(pace.Pace, every_us=60_000_000)
    references = sys.getrefcount(job.page)
    thread = threading.Thread(target=job.wait)
    thread.start()
    _until(lambda: sys.getrefcount(job.page) > references)
    yield job
    job.pace.stop()
    thread.join()


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not holds() and time.monotonic() < end:
        time.sleep(1e-3)


@compiled
def test_page_when_it_is_given_up_during_a_wait_then_its_memory_stays_until_that_is_over(
    waiting: Job,
) -> None:
    page = weakref.ref(waiting.page)
    waiting.light.begin(memoryview(bytearray(at.PAGE_BYTES)).cast("q"))
    waiting.words.release()
    del waiting.page
    assert page() is not None
    waiting.pace.stop()
    _until(lambda: page() is None)
    assert page() is None


@compiled
def test_child_when_forked_during_a_wait_then_it_may_close_its_parents_page(waiting: Job) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            waiting.light.begin(memoryview(bytearray(at.PAGE_BYTES)).cast("q"))
            waiting.words.release()
            waiting.page.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@compiled
@pytest.mark.parametrize(
    "words", [memoryview(bytearray(64)).cast("q"), memoryview(bytes(at.PAGE_BYTES)), b"no view", None]
)
def test_compiled_wait_when_there_is_no_page_then_an_error_and_nothing_is_read(words: Any) -> None:
    job = Job(pace.Pace)
    if words is None:
        words = memoryview(bytearray(at.PAGE_BYTES))
        words.release()
    with pytest.raises((ValueError, TypeError, BufferError)):
        job.pace.wait(job.light, words)
    assert job.pace.ticks == 0
