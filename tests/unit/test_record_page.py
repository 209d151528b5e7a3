"""Is what is written into a page what a reader gets, also from a torn one?"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allranks.record import layout as at
from allranks.record.page import (
    ExitKind,
    NotARecord,
    PageReader,
    Phase,
    Role,
    ask,
    parse,
    read_page,
    read_pages,
    side_file,
)
from allranks.record.writer import Writer


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    made = Writer()
    made.open(str(tmp_path))
    return made


def path_of(writer: Writer) -> str:
    assert writer.path is not None
    return writer.path


def test_page_when_new_then_says_who_it_is(writer: Writer) -> None:
    record = read_page(path_of(writer))
    assert (record.pid, record.parent_pid, record.role) == (os.getpid(), os.getppid(), Role.OTHER)
    assert (record.rank, record.step, record.phase, record.exit.kind) == (
        -1,
        0,
        Phase.START,
        ExitKind.NOT_ENDED,
    )
    assert record.host == os.uname().nodename
    assert record.command


def test_phase_when_marked_then_line_since_and_time_spent(writer: Writer) -> None:
    line = writer.string("/a/train.py:12 main")
    first = read_page(path_of(writer)).phase_since_ns
    writer.phase(Phase.BACKWARD, line)
    inside = read_page(path_of(writer))
    writer.leave()
    writer.flush()
    after = read_page(path_of(writer))
    assert (inside.phase, inside.line) == (Phase.BACKWARD, "/a/train.py:12 main")
    assert first < inside.phase_since_ns < after.phase_since_ns
    assert (after.phase, after.line) == (Phase.START, "")
    assert after.phase_ns[Phase.BACKWARD] == after.phase_since_ns - inside.phase_since_ns
    assert after.marks != inside.marks


def test_phase_when_from_another_thread_then_not_written(writer: Writer) -> None:
    writer.owner += 1
    writer.phase(Phase.EVALUATE)
    writer.leave()
    assert read_page(path_of(writer)).phase == Phase.START


def test_glance_when_compared_with_record_then_the_same(writer: Writer) -> None:
    writer.set_step(7, 2, epoch=3)
    writer.phase(Phase.DATA)
    with PageReader(path_of(writer)) as reader:
        glance, record = reader.glance(), reader.read()
    for field in dataclasses.fields(glance):
        expected = record.exit.kind if field.name == "exit_kind" else getattr(record, field.name)
        assert getattr(glance, field.name) == expected, field.name


def test_steps_when_many_then_median_is_of_the_last_32(writer: Writer) -> None:
    for _ in range(100):
        writer.end_step()
    ends = [1_000_000 * k for k in range(69, 101)]
    for step, end in zip(range(69, 101), ends, strict=True):
        writer.words[at.STEP_ENDS + step % at.NUM_STEP_ENDS] = end
    writer.words[at.STEP_ENDED] = 100
    record = read_page(path_of(writer))
    assert (record.step, record.step_ended) == (100, 100)
    assert record.step_ends_ns == tuple(ends)
    assert record.median_step_ns == 1_000_000


def test_set_step_when_library_resumes_then_counts_from_there(writer: Writer) -> None:
    writer.set_step(1200, 0, epoch=4)
    writer.set_step(1200, 1)
    record = read_page(path_of(writer))
    assert (record.step, record.micro_step, record.epoch, record.is_library_stepped) == (1200, 1, 4, True)
    assert (len(record.step_ends_ns), record.step_ended) == (1, 1200)


def test_collectives_when_more_than_the_ring_then_the_last_ones(writer: Writer) -> None:
    op, group = writer.string("all_reduce"), writer.string("default")
    for size in range(50):
        slot = writer.enter_collective(op, group, shape=(size, 3), numel=3 * size, num_tensors=1, seq=size)
        writer.exit_collective(slot)
    writer.enter_collective(writer.string("send"), root=1, is_counted=False)
    record = read_page(path_of(writer))
    assert [c.number for c in record.collectives] == list(range(20, 52))
    assert record.issued == 50  # a send is not what all ranks must have done
    assert record.inside is not None and (record.inside.op, record.inside.root) == ("send", 1)
    last = record.collectives[-2]
    assert (last.op, last.group, last.shape, last.numel, last.seq) == (
        "all_reduce",
        "default",
        (49, 3),
        147,
        49,
    )
    assert not last.is_inside


def test_collective_when_context_raises_then_failed_and_left(writer: Writer) -> None:
    with pytest.raises(ValueError), writer.collective("own"):
        assert read_page(path_of(writer)).phase == Phase.COLLECTIVE
        raise ValueError
    record = read_page(path_of(writer))
    assert record.phase == Phase.START
    assert record.collectives[-1].has_failed and not record.collectives[-1].is_inside


@pytest.mark.parametrize("word", range(at.SLOT_WORDS))
def test_slot_when_its_writer_stopped_in_it_then_left_out(word: int) -> None:
    writer = Writer()
    one = writer.enter_collective(writer.string("barrier"))
    writer.enter_collective(writer.string("all_reduce"))
    head, tail = one + at.S_HEAD, one + at.S_TAIL
    writer.words[head] = writer.words[tail] = 0  # as enter_collective begins
    writer.words[one + word] = 33
    found = parse(bytes(writer.buffer), "")
    assert [c.op for c in found.collectives] == ["all_reduce"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=200))
def test_string_when_read_by_number_then_the_same_or_nothing(texts: list[str]) -> None:
    writer = Writer()
    for text in texts:
        text = text.replace("\0", "x")
        writer.mark(Phase.PYTHON | writer.string(text) << 8)
        read = parse(bytes(writer.buffer), "").line
        raw = text.encode("utf-8", "replace")
        if len(raw) <= at.MAX_STRING_BYTES:
            assert read == raw.decode("utf-8", "replace")
        else:
            assert read.startswith("...")


def test_strings_when_room_is_used_up_then_old_numbers_say_nothing_wrong() -> None:
    writer = Writer()
    forgotten: list[int] = []
    writer.on_strings_full.append(lambda: forgotten.append(1))
    first = writer.string("the first line")
    for k in range(2000):
        writer.string(f"another line {k} {'x' * (k % 90)}")
    writer.mark(Phase.PYTHON | first << 8)
    assert parse(bytes(writer.buffer), "").line == ""
    assert forgotten
    assert writer.string("the first line") != first


def test_last_words_when_long_then_cut_and_whole_in_the_rest(writer: Writer) -> None:
    writer.last_words(at.EXCEPTION, "ValueError", "bad \0 value " + "\xe9" * 2000, "/a/train.py:3 f")
    words = read_page(path_of(writer)).exception
    assert words is not None
    assert (words.type, words.line, words.thread) == ("ValueError", "/a/train.py:3 f", "")
    assert words.message.startswith("bad   value \xe9")


def test_exited_when_said_twice_then_the_first_but_an_end_gives_way(writer: Writer) -> None:
    writer.exited(at.ENDED)
    writer.exited(at.HARD_EXIT, 3)
    writer.exited(at.SYSTEM_EXIT, 4)
    found = read_page(path_of(writer)).exit
    assert (found.kind, found.code) == (ExitKind.HARD_EXIT, 3)


def test_open_when_again_then_a_page_of_its_own(writer: Writer, tmp_path: Path) -> None:
    writer.set_step(5)
    other = tmp_path / "other"
    other.mkdir()
    writer.open(str(other))
    assert read_page(path_of(writer)).step == 0
    assert Path(path_of(writer)).parent == other


def test_open_when_folder_is_missing_then_record_goes_on_where_it_was(writer: Writer, tmp_path: Path) -> None:
    before = path_of(writer)
    with pytest.raises(OSError):
        writer.open(str(tmp_path / "missing"))
    writer.set_step(3)
    assert read_page(before).step == 3


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(at.PAGE_BYTES)])
def test_read_when_no_page_then_says_so(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "1.page"
    path.write_bytes(data)
    with pytest.raises(NotARecord):
        read_page(path)
    assert read_pages(tmp_path) == []


def test_ask_when_twice_then_numbers_grow(writer: Writer) -> None:
    assert (ask(path_of(writer)), ask(path_of(writer))) == (1, 2)
    record = read_page(path_of(writer))
    assert (record.asked, record.answered) == (2, 0)
    assert side_file(record, ".fr.json").name == f"{os.getpid()}.fr.json"
