"""Which bytes are shown, when, and what is kept of a rank's last words?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from allranks.run.lines import HOLD_S, AsIs, Prefixed, Tail

TRACE = b"Traceback (most recent call last):\n  File 'x'\nValueError: y\n"


def test_as_is_when_there_is_no_traceback_then_bytes_pass_at_once() -> None:
    form = AsIs()
    assert form.feed(b"\r 10%", 0.0) == b"\r 10%"
    assert form.feed(b"\x00\xff\n", 0.1) == b"\x00\xff\n"


def test_as_is_when_a_traceback_comes_then_it_waits_and_then_is_shown_in_order() -> None:
    form = AsIs()
    assert form.feed(b"before\n" + TRACE, 0.0) == b"before\n"
    assert form.feed(b"after\n", 0.1) == b""
    assert form.tick(HOLD_S - 0.1) == b""
    assert form.tick(HOLD_S + 0.1) == TRACE + b"after\n"
    assert form.feed(b"more\n", HOLD_S + 0.2) == b"more\n"


def test_as_is_when_torch_prefixes_the_traceback_then_it_waits_too() -> None:
    assert AsIs().feed(b"[rank0]: " + TRACE, 0.0) == b""


@given(st.lists(st.integers(1, 12), max_size=30))
def test_as_is_however_the_bytes_are_cut_then_none_is_lost_or_moved(cuts: list[int]) -> None:
    data, form, out, at = b"one\ntwo\n" + TRACE + b"three\n", AsIs(), b"", 0
    for size in cuts:
        out += form.feed(data[at : at + size], 0.0)
        at += size
    out += form.feed(data[at:], 0.0)
    assert out + form.release() == data
    assert b"ValueError" not in out


@given(
    st.lists(
        st.binary(max_size=20).filter(lambda b: b"\n" not in b and b"\r" not in b), min_size=1, max_size=10
    ),
    st.integers(1, 7),
)
def test_prefixed_however_the_bytes_are_cut_then_whole_lines(lines: list[bytes], size: int) -> None:
    data, form, out = b"".join(line + b"\n" for line in lines), Prefixed(b"[rank 1] "), b""
    for at in range(0, len(data), size):
        part = form.feed(data[at : at + size], 0.0)
        assert part == b"" or part.endswith(b"\n")
        out += part
    assert out == b"".join(b"[rank 1] " + line + b"\n" for line in lines)


def test_prefixed_when_a_bar_redraws_then_at_most_once_a_second_and_the_last_is_kept() -> None:
    form, shown = Prefixed(b"> "), b""
    for i in range(100):
        shown += form.feed(b"\r%d%%" % i, i / 100)
    shown += form.feed(b"\r100%\n", 1.0)
    assert shown.splitlines()[-1] == b"> 100%"
    assert len(shown.splitlines()) <= 3


def test_prefixed_when_a_line_stays_unfinished_then_it_is_shown_after_a_second() -> None:
    form = Prefixed(b"> ")
    assert form.feed(b"go on? ", 0.0) == b""
    assert form.tick(0.5) == b""
    assert form.tick(1.1) == b"> go on? \n"


def test_tail_then_the_last_lines_without_colours_and_what_bars_overwrote() -> None:
    tail = Tail(limit_bytes=64)
    tail.feed(b"x" * 1000 + b"\n")
    tail.feed(b"\x1b[31mred\x1b[0m\n\r 1%\r 99%\r100%\nbad \xff\x07\n")
    assert tail.lines()[-3:] == ("red", "100%", "bad \\xff\\x07")
    assert sum(map(len, tail.lines())) < 100
