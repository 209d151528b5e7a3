"""Marks of torch.utils.data (and torchdata's StatefulDataLoader): passes, batches, loader workers, samples."""

from __future__ import annotations

import functools
import inspect
from _thread import get_ident
from collections.abc import Callable, Iterator
from sys import _getframe
from time import monotonic_ns
from typing import Any

from allranks.record import compat, counts, draws, passes, process, states, taken, thrown
from allranks.record import layout as at
from allranks.record.layout import W_SINCE_NS
from allranks.record.light import stands_for
from allranks.record.probe_training import resume

_writer, _lines = process.WRITER, process.LINES
_light = _writer.light
_DRAWN, _ENDED_NS = at.LOADER + at.L_DRAWN, at.LOADER + at.L_ENDED_NS
_passes = 0
_current: Pass | None = None


class Pass:
    """One pass over a loader; hangs on its iterator."""

    __slots__ = (
        "drawn", "ended_ns", "followed", "indices", "key", "length", "num_workers", "number", "pids", "started_ns",
    )  # fmt: skip

    def __init__(self, loader: Any, line: int) -> None:
        global _passes
        _passes += 1
        self.number, self.key, self.started_ns = _passes, at.DATA | line, monotonic_ns()
        self.drawn = self.ended_ns = 0  # of the current one light.drawn counts
        self.length = compat.loader_length(loader)
        self.num_workers = int(getattr(loader, "num_workers", 0) or 0)
        self.pids: list[int] = []
        self.followed: passes.Followed | None = None
        self.indices = taken.Taken()


def mark_loaders(module: Any) -> None:
    """DataLoader.__iter__ (public) begins a pass; its iterator's __next__ (compat) draws a batch."""
    module.DataLoader.__iter__ = _marked_iter(module.DataLoader.__iter__)
    iterator = compat.loader_iterator(module)
    if iterator is None:
        compat.step_aside("a DataLoader's batches")
        return
    iterator.__next__ = _marked_next(iterator.__next__)  # type: ignore[attr-defined]
    if compat.begins_to_take(iterator):
        taken.mark_indices(iterator)
    else:
        compat.step_aside("which samples a loader reads")


def mark_stateful_loaders(module: Any) -> None:
    """The same of torchdata's loader, whose iterators inherit torch's __next__."""
    module.StatefulDataLoader.__iter__ = _marked_iter(module.StatefulDataLoader.__iter__)
    if (taking := compat.taking_iterator(module)) is not None:
        taken.mark_taking(taking)


def _marked_iter(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(begin)
    def marked(self: Any) -> Any:
        if states.is_other_thread():
            return begin(self)
        line = _lines.here()
        before = _writer.mark(at.DATA | line)
        asked_ns = monotonic_ns()
        try:
            iterator = begin(self)  # starts the loader workers
        finally:
            _writer.mark(before)
        try:
            one = iterator._allranks_pass = Pass(self, line)
        except AttributeError:  # not torch's iterator, one with slots
            return iterator
        one.pids = compat.loader_workers(iterator)
        _show(one)
        one.followed = passes.begin(self, _writer.name_of(line >> 8), asked_ns)
        one.indices = taken.indices_of(iterator)
        return iterator

    return marked


def _show(one: Pass) -> None:
    """`one` is the current pass from now on."""
    global _current
    words = _writer.words
    if _current is not None:
        words[_DRAWN] = _current.drawn = _light.drawn
    if _current is not None and _current.number != one.number:
        words[at.LOADER_BEFORE : at.LOADER_BEFORE + 8] = words[at.LOADER : at.LOADER + 8]
    _current = one
    _light.drawn, _light.data_key, _light.iterator = one.drawn, one.key, 0
    place = at.LOADER
    words[place + at.L_NUMBER] = 0
    words[place + at.L_DRAWN], words[place + at.L_LENGTH] = one.drawn, one.length
    words[place + at.L_LINE], words[place + at.L_NUM_WORKERS] = one.key >> 8, one.num_workers
    words[place + at.L_STARTED_NS], words[place + at.L_ENDED_NS] = one.started_ns, one.ended_ns
    words[place + at.L_NUMBER] = one.number
    for index in range(at.NUM_LOADER_PIDS):
        words[at.LOADER_PIDS + index] = one.pids[index] if index < len(one.pids) else 0


def _marked_next(draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
    light = _light

    @functools.wraps(draw)
    def marked_next(self: Any) -> Any:
        if light.is_on and id(self) == light.iterator:
            try:
                batch = draw(self)
            except BaseException as error:
                stopped(error, self)
                raise
            finally:
                if not light.is_on:
                    resume()
            light.drawn = light.drawn_word[0] = light.drawn + 1
            return batch
        return _draw(draw, self)

    def stopped(error: BaseException, iterator: Any) -> None:
        one = getattr(iterator, "_allranks_pass", None)
        if not isinstance(error, StopIteration):
            thrown.note(error, thrown.BATCH)
        elif one is not None:  # else it has the id of one that is gone
            _pass_ended(one)

    stands_for(at.DATA, marked_next, draw)
    return counts.quicken(marked_next, counts.NEXT_BATCH, light, draw, stopped, resume)


def _draw(draw: Callable[[Any], Any], iterator: Any) -> Any:
    """With whole marks."""
    try:
        one = iterator._allranks_pass
    except AttributeError:
        return draw(iterator)
    if get_ident() != _writer.owner:
        one.indices = taken.forget_indices(iterator)
        return draw(iterator)
    if one is not _current:
        _show(one)
    _light.iterator = id(iterator)
    if _light.is_on:
        _writer.end_light(monotonic_ns(), _getframe(1).f_back)
    before, words = _writer.mark(one.key), _writer.words
    begin = words[W_SINCE_NS]
    try:
        batch = draw(iterator)
    except StopIteration:
        _pass_ended(one)
        raise
    except BaseException as error:
        thrown.note(error, thrown.BATCH)
        raise
    finally:
        _writer.mark(before)
    words[_DRAWN] = _light.drawn = drawn = _light.drawn + 1
    if _writer.is_timed:
        _writer.times[at.M_DATA_FROM], _writer.times[at.M_DATA_TO] = begin, words[W_SINCE_NS]
    one.followed = passes.handed(one.followed, one.indices, drawn)
    return batch


def _pass_ended(one: Pass) -> None:
    _light.iterator = 0
    one.followed = passes.handed(one.followed, one.indices, _light.drawn)
    one.ended_ns = _writer.words[_ENDED_NS] = monotonic_ns()
    if one.followed is not None:
        passes.ended(one.followed)
        one.followed = None


def mark_workers(module: Any) -> None:
    """What a loader worker runs."""
    loop = compat.worker_loop(module)
    if loop is None:
        compat.step_aside("loader workers")
        return
    parameters = tuple(inspect.signature(loop).parameters)

    @functools.wraps(loop)
    def marked(*args: Any, **kwargs: Any) -> None:
        process.become(at.LOADER_WORKER)
        for put in _FETCHING:
            put()
        words = _writer.words
        words[at.W_WORKER_ID] = compat.worker_id_of(args, kwargs, parameters)
        words[at.SAMPLE_INDEX] = -1
        loop(*args, **kwargs)
        process.remove_files()  # it came to its end: nothing to tell, and every epoch may start new ones

    module._worker_loop = marked


_FETCHING: list[Callable[[], None]] = []
"""What puts the marks of fetching in place again: a rank takes its own off when it has seen enough, and its forked workers want them."""


def mark_fetching(module: Any) -> None:
    """In a loader worker: the indices of the batch being read, and which of them. In a rank: only the first batches."""
    fetcher = compat.map_fetcher(module)
    if fetcher is None:
        compat.step_aside("the samples of loader workers")
        return
    fetch = fetcher.fetch  # type: ignore[attr-defined]

    @functools.wraps(fetch)
    def marked(self: Any, indices: Any) -> Any:
        words = _writer.words
        if words[at.W_ROLE] != at.LOADER_WORKER:
            if not draws.is_looking() and vars(fetcher)["fetch"] is marked:
                fetcher.fetch = fetch  # type: ignore[attr-defined]
            return draws.watched(fetch, self, indices)
        _begin_fetch(words, indices if compat.reads_lists(self) else [indices])
        _writer.mark(at.DATA)
        if compat.reads_lists(self) and not compat.has_batched_read(self) and type(indices) is list:
            indices = _Watched(indices)
        try:
            return draws.watched(fetch, self, indices)
        finally:
            _writer.mark(at.PYTHON)
            _writer.flush()
            words[at.SAMPLE_COUNT], words[at.SAMPLE_INDEX] = 0, -1

    def put() -> None:
        if vars(fetcher)["fetch"] is fetch:
            fetcher.fetch = marked  # type: ignore[attr-defined]

    put()
    _FETCHING.append(put)
    if (iterable := compat.iterable_fetcher(module)) is not None:
        iterable.fetch = draws.watching(iterable.fetch)  # type: ignore[attr-defined]


def _begin_fetch(words: memoryview, indices: Any) -> None:
    words[at.SAMPLE_TASK] += 1
    words[at.SAMPLE_INDEX] = -1
    words[at.SAMPLE_NS] = monotonic_ns()
    try:
        some, count = list(indices[: at.NUM_SAMPLES]), len(indices)
    except Exception:  # noqa: BLE001 - what the user's sampler gave
        some, count = [], 1
    for place, index in enumerate(some):
        is_number = isinstance(index, int) and -(1 << 62) < index < 1 << 62
        words[at.SAMPLES + place] = index if is_number else -1
    words[at.SAMPLE_COUNT] = count


class _Watched(list):
    """The indices of a batch; notes which one is being read."""

    def __iter__(self) -> Iterator[Any]:
        words = _writer.words
        for place, index in enumerate(list.__iter__(self)):
            words[at.SAMPLE_INDEX] = place
            words[at.SAMPLE_NS] = monotonic_ns()
            yield index
