"""Is nothing said of what only looks like a fault: the same on all ranks, in groups of their own, or just begun?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.watch.decide import decide
from allranks.watch.evidence import Call, Evidence, Rank, Record, Stack
from allranks.watch.verdict import Place

LINE = Place("/home/ann/train.py", 27, "main", "loss.backward()")
DOING = {
    "AR223": ("futex_do_wait", "with lock:"),
    "AR226": ("hrtimer_nanosleep", "time.sleep(9)"),
    "AR227": ("n_tty_read", "input()"),
    "AR230": ("anon_pipe_write", "file.write(data)"),
    "AR233": ("locks_lock_inode_wait", "fcntl.flock(f, LOCK_EX)"),
    "AR234": ("do_wait", "subprocess.run(['tar'])"),
    "AR235": ("wait_woken tcp_recvmsg", "sock.recv(10)"),
}
CALL = Call(
    "all_reduce", 1, "default", seq=16, shape=(4,), numel=4, dtype="float32", root=0, where=LINE, step=11
)
OTHERWISE = {
    "AR252": {"op": "broadcast"},
    "AR253": {"shape": (5,), "numel": 5},
    "AR254": {"dtype": "int32"},
    "AR255": {"root": 1},
    "AR256": {"reduce_op": "MAX"},
    "AR258": {"where": replace(LINE, line=31)},
}


def doing(number: int, wchan: str, code: str, for_s: float = 4.0) -> Rank:
    """At a line of its own."""
    record = Record(step=30, phase="python", phase_s=for_s, median_step_s=0.01, group_seq=58)
    stack = Stack((replace(LINE, line=30, code=code),), is_main=True)
    return Rank(number, "gpu-a", pid=100 + number, state="S", wchan=wchan, record=record, stacks=(stack,))


def waiting(for_s: float) -> Rank:
    """In the gradient all-reduce of its backward."""
    record = Record(
        step=30, phase="backward", phase_s=for_s, median_step_s=0.01, group_seq=60, where=LINE, is_probed=True
    )
    return Rank(0, "gpu-a", pid=100, state="S", wchan="futex_do_wait", record=record)


def code_of(*ranks: Rank, trigger: str = "waiting") -> str:
    verdict = decide(Evidence(2, ranks, trigger=trigger, cwd="/home/ann"))
    return verdict.code if verdict is not None else ""


@pytest.mark.parametrize("code", DOING)
def test_standing_when_all_ranks_do_it_or_one_has_just_begun_then_nothing_is_said(code: str) -> None:
    assert code_of(waiting(4.0), doing(1, *DOING[code])) == code
    assert code_of(doing(0, *DOING[code]), doing(1, *DOING[code])) == ""
    assert code_of(waiting(0.3), doing(1, *DOING[code], for_s=0.3)) == ""


@pytest.mark.parametrize(
    ("file", "function", "words"),
    [
        ("/usr/lib/python3.11/queue.py", "get", "waits for a queue that no thread fills"),
        ("/usr/lib/python3.11/threading.py", "join", "waits for a thread that does not end"),
        ("/usr/lib/python3.11/threading.py", "acquire", "deadlock of two threads"),
    ],
)
def test_thread_when_it_waits_for_another_then_a_deadlock_of_locks_only_where_it_takes_one(
    file: str, function: str, words: str
) -> None:
    rank = doing(1, "futex_do_wait", "take(it)")
    library = Place(file, 171, function, "self.not_empty.wait()")
    stacks = tuple(
        Stack((library, *rank.stacks[0].frames), thread=name, is_main=not name) for name in ("", "loads")
    )
    verdict = decide(
        Evidence(2, (waiting(4.0), replace(rank, stacks=stacks)), trigger="waiting", cwd="/home/ann")
    )
    assert verdict is not None and verdict.code == "AR223"
    assert words in verdict.what and any("(thread loads)" in line for line in verdict.where)


def test_socket_when_the_rank_receives_then_it_waits_for_the_network_and_no_terminal() -> None:
    assert code_of(waiting(4.0), doing(1, "wait_woken", "sock.recv(10)")) == "AR235"
    assert code_of(waiting(4.0), doing(1, "wait_woken", "go(on)")) == "AR236"


def after(number: int, call: Call) -> Rank:
    """A rank that has come back from a call."""
    record = Record(step=11, phase="python", median_step_s=0.01, group_seq=17, calls=(call,), is_probed=True)
    return Rank(number, "gpu-a", pid=100 + number, state="S", record=record)


@pytest.mark.parametrize("code", OTHERWISE)
def test_calls_when_they_differ_in_groups_or_at_places_of_their_own_then_nothing_is_said(code: str) -> None:
    other = replace(CALL, **OTHERWISE[code])
    assert code_of(after(0, CALL), after(1, other), trigger="mismatch") == code
    assert code_of(after(0, CALL), after(1, CALL), trigger="mismatch") == ""
    assert code_of(after(0, CALL), after(1, replace(other, seq=17)), trigger="mismatch") == ""
    mine, theirs = replace(CALL, group="a", members="0"), replace(other, group="b", members="1")
    assert code_of(after(0, mine), after(1, theirs), trigger="mismatch") == ""
