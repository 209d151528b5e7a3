"""What has this process of a record? Its one writer, its page, its stacks on demand, before and after a fork."""

from __future__ import annotations

import os

from allranks.record import layout as at
from allranks.record.lines import Lines
from allranks.record.writer import Writer

# One of each per process, for good: what is marked holds on to them, and a fork or `open` changes what is behind them.
WRITER = Writer()
LINES = Lines(WRITER)
WRITER.line_of = LINES.of

_folder = ""
_stack_descriptor = -1
_is_crash_file_ours = False
_follows_forks = False
# What else must be put right in a forked child, such as the set of threads inside collectives.
AFTER_FORK: list = []


def open_page(folder: str) -> None:
    """Give this process its page and its stacks in `folder`, and its forked children theirs.

    Raises:
        OSError: As Writer.open.
    """
    global _folder, _follows_forks
    WRITER.open(folder)
    _folder = folder
    _know_place()
    _register_stacks(folder)
    if not _follows_forks:
        _follows_forks = True
        os.register_at_fork(after_in_child=_after_fork)


def remove_files() -> None:
    """Remove the page, the stacks and what lies beside them."""
    if WRITER.path is None:
        return
    stem = WRITER.path[: -len(at.SUFFIX)]
    for suffix in at.ALL_SUFFIXES:
        try:
            os.unlink(stem + suffix)  # noqa: PTH108 - pathlib costs 5 ms at the start of every process
        except OSError:
            continue


def side_path(suffix: str) -> str | None:
    """The path of a file beside the page; None if the record is in memory only."""
    return None if WRITER.path is None else WRITER.path[: -len(at.SUFFIX)] + suffix


def become(role: int, *, rank: int = -1, world_size: int = 0, local_rank: int = -1) -> None:
    """This process is a rank, or a loader worker; what is not known stays as it was."""
    words = WRITER.words
    words[at.W_ROLE] = role
    if rank >= 0:
        words[at.W_RANK] = rank
    if world_size > 0:
        words[at.W_WORLD_SIZE] = world_size
    if local_rank >= 0:
        words[at.W_LOCAL_RANK] = local_rank


def set_flag(flag: int) -> None:
    """Set a bit of FLAGS."""
    WRITER.words[at.W_FLAGS] |= flag


def number_in(name: str, otherwise: int = -1) -> int:
    """A whole number from the environment (of torchrun, not ours to check)."""
    try:
        return int(os.environ.get(name, ""))
    except ValueError:
        return otherwise


def _know_place() -> None:
    # Every process below a rank inherits its variables; only the agent's own child is the rank (so far: a script that
    # starts its ranks itself makes them known at init_process_group).
    is_rank = number_in("RANK") >= 0 and number_in("ALLRANKS_AGENT_PID") == os.getppid()
    become(
        at.RANK_ROLE if is_rank else at.OTHER,
        rank=number_in("RANK"),
        world_size=number_in("WORLD_SIZE", 0),
        local_rank=number_in("LOCAL_RANK"),
    )


def _register_stacks(folder: str) -> None:
    """Stacks of all threads into `<pid>.stack`: at a crash, and on at.stack_signal()."""
    global _stack_descriptor, _is_crash_file_ours
    import faulthandler

    signum = at.stack_signal()
    path = os.path.join(folder, f"{os.getpid()}{at.STACK_SUFFIX}")  # noqa: PTH118 - pathlib costs 5 ms here
    old, flags = _stack_descriptor, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    _stack_descriptor = os.open(path, flags, 0o600)
    if _is_crash_file_ours or not faulthandler.is_enabled():  # else the user wants crashes on stderr
        faulthandler.enable(_stack_descriptor)
        _is_crash_file_ours = True
    if signum:
        faulthandler.register(signum, _stack_descriptor, all_threads=True, chain=False)
        WRITER.words[at.W_STACK_SIGNAL] = signum
    if old >= 0:
        os.close(old)


def _after_fork() -> None:
    """In the child: a page of its own, never the parent's."""
    if not _folder or WRITER.path is None:
        return
    words, page = WRITER.words, WRITER.buffer
    flags = words[at.W_FLAGS] & ~at.LIBRARY_STEPS | at.FORKED
    place = (words[at.W_RANK], words[at.W_WORLD_SIZE], words[at.W_LOCAL_RANK])
    try:
        WRITER.open(_folder)
        _register_stacks(_folder)
    except OSError:
        WRITER.close()
    try:  # noqa: SIM105 - contextlib costs time at the start of every process
        # Else it stays open and mapped: the parent's record thread, which is not here to give it back, held on to it (_quick.c).
        page.close()  # type: ignore[union-attr]
    except BufferError:  # another of its threads was reading
        pass
    WRITER.words[at.W_FLAGS] = flags
    become(at.OTHER, rank=place[0], world_size=place[1], local_rank=place[2])
    for repair in AFTER_FORK:
        repair()
