"""How does a text get into a page? Written once and named by a number from then on, or cut to a fixed place.

When the room for named ones is used up it starts over: a number of before then means nothing, never something else.
"""

from __future__ import annotations

from time import monotonic_ns

from allranks.record import layout as at

TYPE_CHECKING = False  # as in writer.py
if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable


_ROOM = (at.STRINGS_END - at.STRINGS) // 4


class Texts:
    """The texts of a page that one process writes."""

    __slots__ = ("_generation", "_next_string", "_num_seen", "_numbers", "buffer", "on_strings_full", "words")

    def __init__(self) -> None:
        self.on_strings_full: list[Callable[[], None]] = []
        self._numbers: dict[str, int] = {}
        self.buffer: mmap.mmap | bytearray
        self.words: memoryview

    def _begin_texts(self) -> None:
        self._next_string = at.STRINGS
        self._generation = self._num_seen = 0
        self._forget_strings()

    def string(self, text: str) -> int:
        """A number for `text`, the same each time, 0 for the empty one; starts over when the room is full."""
        if not text:
            return 0
        number = self._numbers.get(text)
        return self._add_string(text) if number is None else number

    def name_of(self, number: int) -> str:
        """The text that `string` gave `number` for; "" if it is written over. Not for every step."""
        known = tuple(self._numbers.items())  # at once: the tick thread may add one meanwhile
        return next((text for text, has in known if has == number), "")

    @property
    def has_room(self) -> bool:
        """Whether a text or two more will not make it start over."""
        return self._next_string < at.STRINGS_END - _ROOM

    def _add_string(self, text: str) -> int:
        raw = text.encode("utf-8", "replace")
        if len(raw) > at.MAX_STRING_BYTES:  # the end says more: it has the line and the function
            raw = b"..." + raw[3 - at.MAX_STRING_BYTES :]
        size = 2 + (len(raw) + 7) // 8
        if self._next_string + size > at.STRINGS_END:
            self._next_string = at.STRINGS
            self._generation += 1
            self._forget_strings()
        word = self._next_string
        self._next_string = word + size
        number = (self._generation << 16) | word
        w = self.words
        for old in range(word, word + size):  # a number of the generation before must not be found here
            w[old] = 0
        self._bytes(word + 1, raw)
        w[word] = number
        self._numbers[text] = number
        return number

    def seen(self, text: str) -> int:
        """A number for `text` until the next but one is seen; the tick thread's, so it leaves the room of `string` alone."""
        w = self.words
        self._num_seen += 1
        word = at.SEEN + self._num_seen % 2 * at.SEEN_WORDS
        w[word] = 0
        self._bytes(word + 1, text.encode("utf-8", "replace")[-at.MAX_STRING_BYTES :])
        w[word] = number = self._num_seen << 16 | word
        return number

    def text(self, word: int, text: str, most: int) -> None:
        """Write `text`, cut to `most` bytes, into the fixed place at `word`."""
        self._bytes(word, text.encode("utf-8", "replace")[:most])

    def _bytes(self, word: int, raw: bytes) -> None:
        start = 8 * (word + 1)
        self.buffer[start : start + len(raw)] = raw
        self.words[word] = len(raw)

    def _forget_strings(self) -> None:
        self._numbers.clear()
        for forget in self.on_strings_full:
            forget()

    def last_words(self, place: int, kind: str, message: str, line: str, thread: str = "") -> None:
        """The exception that ends the script (`layout.EXCEPTION`) or a thread (`layout.THREAD_EXCEPTION`)."""
        room = 8 * at.LAST_WORDS_WORDS - 16
        kind, thread = kind[:100], thread[:60]
        fixed = len(f"{kind}{line}{thread}".encode("utf-8", "replace")) + 3
        raw = message.replace("\0", " ").encode("utf-8", "replace")[: max(0, room - fixed)]
        message = raw.decode("utf-8", "ignore")
        self.text(place + 1, f"{kind}\0{message}\0{line}\0{thread}", room)
        self.words[place] = monotonic_ns()
