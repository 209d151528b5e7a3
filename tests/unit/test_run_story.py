"""Does the story name the rank that failed on its own, and show its traceback and nobody else's?"""

from __future__ import annotations

import signal

import pytest

from allranks.core.job import RankExit
from allranks.run.story import tell
from allranks.run.tracebacks import is_consequence, last_traceback

OWN = """Traceback (most recent call last):
  File "/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 368, in wrapper
    return f(*args, **kwargs)
  File "/home/u/train.py", line 12, in main
    loss = step(batch)
  File "/home/u/train.py", line 30, in step
    raise ValueError("loss is nan")
ValueError: loss is nan"""
CLOSED = """Traceback (most recent call last):
  File "/home/u/train.py", line 40, in main
    loss.backward()
  File "/x/site-packages/torch/autograd/graph.py", line 829, in _engine_run_backward
    return Variable._execution_engine.run_backward(
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:51234"""


def exit_of(
    rank: int,
    text: str = "",
    *,
    code: int = 1,
    sig: int | None = None,
    when: float = 1.0,
    by_us: bool = False,
) -> RankExit:
    lines = tuple(text.split("\n")) if text else ()
    return RankExit(rank, f"host{rank}", rank, -1 if sig else code, sig, when, lines, by_us=by_us)


def test_tell_when_a_victim_was_heard_first_then_the_culprit_is_named() -> None:
    told = tell([exit_of(0, CLOSED, when=0.9), exit_of(1, OWN, when=1.2)], 2)
    first = told.text.split("\n")[0]
    assert "rank 1 of 2 on host host1 raised ValueError: loss is nan at train.py:30" in first
    assert "rank 0 failed in consequence" in told.text
    assert "Connection closed" not in told.text
    assert (told.exit_code, told.by_script) == (1, True)


def test_tell_when_a_traceback_has_frames_of_launchers_then_they_are_left_out() -> None:
    told = tell([exit_of(1, OWN)], 2)
    assert "elastic" not in told.text
    assert "return f(*args" not in told.text
    assert 'File "/home/u/train.py", line 12, in main' in told.text


def test_tell_when_torch_prefixes_lines_with_the_rank_then_the_traceback_is_the_same() -> None:
    prefixed = "\n".join(f"[rank1]: {line}" for line in OWN.split("\n"))
    noise = "[rank1]:[W1129 18:38:25.877 ProcessGroupGloo.cpp:1] destroy_process_group was not called"
    assert tell([exit_of(1, f"step 3\n{prefixed}\n{noise}")], 2).text == tell([exit_of(1, OWN)], 2).text


@pytest.mark.parametrize(
    ("exit", "code", "exit_code", "says"),
    [
        (exit_of(1, sig=signal.SIGKILL), "AR201", 137, "killed by SIGKILL"),
        (exit_of(1, sig=signal.SIGSEGV), "AR204", 139, "SIGSEGV"),
        (
            exit_of(1, "terminate called\nsizes differ: 8 vs 4", sig=signal.SIGABRT),
            "AR203",
            134,
            "sizes differ",
        ),
        (exit_of(1, "no more disk", code=7), "AR205", 7, "exit code 7"),
    ],
)
def test_tell_when_no_exception_then_the_exit_is_named(
    exit: RankExit, code: str, exit_code: int, says: str
) -> None:
    told = tell([exit, exit_of(0, CLOSED, when=0.5)], 2)
    assert (told.code, told.exit_code) == (code, exit_code)
    assert says in told.text
    assert told.culprit is not None
    assert told.culprit.rank == 1


def test_tell_when_all_are_victims_of_one_that_left_early_then_that_one_is_named() -> None:
    told = tell(
        [exit_of(1, "bye", code=0, when=0.4), exit_of(0, CLOSED, when=0.6), exit_of(2, CLOSED, when=0.7)], 3
    )
    assert told.code == "AR206"
    assert "rank 1 of 3" in told.text.split("\n")[0]


def test_tell_when_the_agent_ended_a_rank_then_it_is_no_cause() -> None:
    told = tell([exit_of(0, sig=signal.SIGKILL, when=0.1, by_us=True), exit_of(1, OWN)], 2)
    assert told.culprit is not None
    assert told.culprit.rank == 1


def test_tell_when_several_ranks_raise_the_same_then_it_is_told_once() -> None:
    told = tell([exit_of(r, OWN, when=1 + r / 10) for r in range(4)], 4)
    assert told.text.count("ValueError: loss is nan") == 2  # the headline and the traceback
    assert "the same error on ranks 1, 2, 3" in told.text


def test_last_traceback_when_exceptions_are_chained_then_the_chain_is_kept_and_the_last_is_named() -> None:
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    x[1]\nKeyError: 1\n\n'
        "During handling of the above exception, another exception occurred:\n\n" + OWN
    )
    found = last_traceback(tuple(text.split("\n")))
    assert found is not None
    assert found.type == "ValueError"
    assert "KeyError: 1" in found.lines


def test_last_traceback_when_a_later_one_did_not_end_the_process_then_it_is_passed_over() -> None:
    later = "Exception ignored in atexit callback <function f at 0x7f>:\n" + CLOSED
    found = last_traceback((*OWN.split("\n"), *later.split("\n")))
    assert found is not None
    assert found.type == "ValueError"


def test_last_traceback_when_the_message_has_lines_then_all_are_kept() -> None:
    text = OWN.replace(
        "ValueError: loss is nan", "RuntimeError: Expected to have finished reduction\nParameter indices: 2 3"
    )
    found = last_traceback(tuple(text.split("\n")))
    assert found is not None
    assert found.message == "Expected to have finished reduction\nParameter indices: 2 3"


def test_last_traceback_when_cut_off_or_absent_then_none() -> None:
    assert last_traceback(("nothing",)) is None
    assert last_traceback(tuple(OWN.split("\n")[:-1])) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RuntimeError: Connection closed by peer [10.0.0.1]:3", True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        (
            "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
            True,
        ),
        ("ValueError: bad shape", False),
        ("ConnectionError: the data server at db:80 is down", False),
        ("FileNotFoundError: train.csv", False),
    ],
)
def test_is_consequence_then_only_what_a_missing_peer_causes(text: str, expected: bool) -> None:
    assert is_consequence(text) is expected
