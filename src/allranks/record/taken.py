"""Which samples are in a batch? Its indices, taken where a loader takes them from its sampler, in this process, whoever reads the samples.

The sampler's iterator goes through three of itertools' own: numbered, kept, given on as it was. No Python of ours runs when the loader
asks. Where all indices are wanted they are kept until they are asked for; later only so many as are on their way, since what is kept
longer is out of the processor's cache when it is dropped: 70 batches of 32 cost 50 us then. No torch here.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from itertools import count, filterfalse
from operator import itemgetter
from typing import Any
from weakref import ref

from allranks.record import compat, states

MAX_EARLY = 256
_SPLIT = "_allranks_taken"
_indices_in = itemgetter(1)


class Taken:
    """The indices of the batches of one pass, by their number, as the sampler gave them."""

    __slots__ = ("_given", "_iterator", "_name", "_numbered", "kept")

    def __init__(self, iterator: Any = None, name: str = "") -> None:
        self.kept: deque[tuple[int, Any]] = deque(maxlen=MAX_EARLY if iterator is None else None)
        self._iterator, self._name = None if iterator is None else ref(iterator), name
        self._numbered: Any = count() if iterator is None else enumerate(vars(iterator)[name])
        self._given: Any = None
        if iterator is not None:
            self._give(vars(iterator))

    def _give(self, own: dict[str, Any]) -> None:
        """What the loader takes from now on is in `kept`, too."""
        own[self._name] = self._given = map(_indices_in, filterfalse(self.kept.append, self._numbered))

    def add(self, indices: Any) -> None:
        """Of a loader whose own iterator stays in place."""
        self.kept.append((next(self._numbered), indices))

    def until(self, drawn: int) -> list[Any]:
        """All that were not asked for yet of the first `drawn` batches."""
        kept, found = self.kept, []
        while kept and kept[0][0] < drawn:
            found.append(kept.popleft()[1])
        return found

    def newest(self, drawn: int) -> Any:
        """Those of the last of `drawn` batches; None = not known. No older ones are kept from now on."""
        kept = self.kept
        while kept and kept[0][0] < drawn - 1:
            kept.popleft()
        if kept.maxlen is None:
            self._keep_few()
        return kept[0][1] if kept and kept[0][0] == drawn - 1 else None

    def _keep_few(self) -> None:
        """The newest, and as many as are on their way to workers, never more than now."""
        own = getattr(self._iterator and self._iterator(), "__dict__", {})
        if own.get(self._name) is self._given:  # else another pass of this iterator has begun
            self.kept = deque(self.kept, len(self.kept))
            self._give(own)


def indices_of(iterator: Any) -> Taken:
    """The indices of the batches of a pass that has just begun; may be empty."""
    own = getattr(iterator, "__dict__", {})
    if compat.keeps_its_sampler(type(iterator)):
        return _queue_of(own)
    if _SPLIT not in own and compat.has_no_workers(iterator):
        _split(iterator)
    return own.get(_SPLIT) or Taken()


def _split(iterator: Any) -> None:
    if (name := compat.sampler_iterator(iterator)) is not None:
        iterator.__dict__[_SPLIT] = Taken(iterator, name)


def forget_indices(iterator: Any) -> Taken:
    """Another thread draws: nobody asks for the indices any more, and what nobody asks for would be kept to the end of the pass."""
    if (taken := iterator.__dict__.pop(_SPLIT, None)) is not None:
        taken.newest(0)
    return Taken()


def mark_indices(iterator_class: Any) -> None:
    """The place where a loader begins to ask its sampler: before its workers are given the first batches (compat names it)."""
    reset: Callable[..., Any] = iterator_class._reset

    @functools.wraps(reset)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = reset(self, *args, **kwargs)
        try:
            if compat.keeps_its_sampler(type(self)):
                self.__dict__.pop(_SPLIT, None)  # of the pass before: the iterator may stay
            elif not states.is_other_thread():
                _split(self)
        except Exception as error:  # noqa: BLE001 - a torch that is not as expected
            compat.step_aside("which samples a loader reads", error)
        return result

    iterator_class._reset = marked


def mark_taking(iterator_class: Any) -> None:
    """The place where a loader that keeps its sampler's iterator asks it."""
    take: Callable[[Any], Any] = iterator_class._next_index

    def marked(self: Any) -> Any:
        taken = take(self)
        _queue_of(self.__dict__).add(taken)
        return taken

    iterator_class._next_index = marked


def _queue_of(own: dict[str, Any]) -> Taken:
    if (taken := own.get(_SPLIT)) is None:
        taken = own[_SPLIT] = Taken()
    return taken
