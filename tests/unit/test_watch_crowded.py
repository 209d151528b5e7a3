"""Is a rank that gets no core of a crowded host left in peace, for as long as the load makes its work longer?

The evidence is that of two runs at a load of 5 to 20 processes a core, in which nobody stood still: the job find_unused (AR224 was
said) and seed_of_rank in its first batches (AR228). A look takes 0.1 s, and the kernel counts a wait for a core when it ends: so a
starved rank may show neither processor time nor a wait.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Rank, Record, Slow, Stack
from allranks.watch.verdict import Place

LINE = Place("/home/ann/train.py", 27, "main", "loss.backward()")


def waiting(phase_s: float, *, step: int = 30, median_step_s: float = 0.02, load: float = 0.5) -> Rank:
    """Rank 0: in the exchange of gradients."""
    record = Record(
        step=step, phase="backward", phase_s=phase_s, median_step_s=median_step_s, group_seq=60, where=LINE
    )
    return Rank(0, "vm", pid=100, state="S", wchan="futex_do_wait", record=record, host_load=load)


def computing(load: float, *, step: int = 30, median_step_s: float = 0.02) -> Rank:
    """Rank 1: at the same line in all looks, with a good part of a core."""
    record = Record(
        step=step, phase="python", phase_s=20.0, median_step_s=median_step_s, group_seq=58, where=LINE
    )
    stack = Stack((Place("/home/ann/train.py", 30, "main", "while x > 0: x = x"),), is_main=True)
    return Rank(
        1, "vm", pid=101, state="R", record=record, stacks=(stack,), main_cpu_share=0.6, cpu_share=0.6, run_queue_share=0.38, host_load=load
    )  # fmt: skip


def reading(load: float, *, state: str = "R") -> Rank:
    """Rank 1: in its loader, without workers, and without a sign of life in this look."""
    record = Record(step=6, phase="data", phase_s=2.0, median_step_s=0.05, group_seq=58, where=LINE)
    frames = (
        Place("/venv/site-packages/torch/utils/data/dataloader.py", 790, "_next_data", "data = self._fetch(index)"),
        Place("/home/ann/train.py", 16, "main", "for x, y in batches:"),
    )  # fmt: skip
    return Rank(
        1, "vm", pid=101, state=state, record=record, stacks=(Stack(frames, is_main=True),), host_load=load
    )


def code_of(*ranks: Rank, trigger: str = "waiting", slow: Slow | None = None) -> str:
    found = decide(Evidence(len(ranks), ranks, trigger=trigger, cwd="/home/ann", slow=slow))
    return found.code if found else ""


@pytest.mark.parametrize(
    ("load", "waited_s", "said"), [(1.0, 25.0, "AR224"), (15.0, 25.0, ""), (15.0, 200.0, "AR224")]
)
def test_first_steps_when_the_host_is_crowded_then_they_are_given_their_time(
    load: float, waited_s: float, said: str
) -> None:
    first = {"step": 0, "median_step_s": 0.0}
    assert code_of(waiting(waited_s, load=load, **first), computing(load, **first)) == said


@pytest.mark.parametrize(
    ("load", "waited_s", "said"), [(1.0, 4.0, "AR224"), (10.0, 4.0, ""), (10.0, 12.0, "AR224")]
)
def test_rank_that_computes_when_the_host_is_crowded_then_a_loop_is_named_later(
    load: float, waited_s: float, said: str
) -> None:
    assert code_of(waiting(waited_s, load=load), computing(load)) == said


@pytest.mark.parametrize(
    ("load", "waited_s", "said"), [(4.6, 2.0, ""), (4.6, 6.0, "AR228"), (1.0, 1.5, ""), (1.0, 3.0, "AR228")]
)
def test_loader_when_its_rank_wants_a_core_then_it_is_not_stuck_yet(
    load: float, waited_s: float, said: str
) -> None:
    assert code_of(waiting(waited_s, step=6, load=load), reading(load)) == said


def test_loader_when_its_rank_sleeps_then_it_is_stuck_whatever_the_load() -> None:
    assert code_of(waiting(2.0, step=6, load=12.0), reading(12.0, state="S")) == "AR228"


@pytest.mark.parametrize(
    ("load", "excess_s", "said"), [(1.0, 0.006, "AR800"), (15.0, 0.006, ""), (15.0, 0.04, "AR800")]
)
def test_straggler_when_the_host_is_crowded_then_only_what_the_load_does_not_explain(
    load: float, excess_s: float, said: str
) -> None:
    slow = Slow(1, 0.005 + excess_s, 0.005, excess_s, 0.012 + excess_s, "python", 4.0)
    ranks = [replace(waiting(0.01), host_load=load), computing(load)]
    assert code_of(*ranks, trigger="slow", slow=slow) == said


@pytest.mark.parametrize(
    ("line", "waited_s", "said"),
    [
        ("while True: pass", 3.0, "AR224"),
        ("while (n > 0): n = n", 3.0, "AR224"),
        ("right += int((model(torch.randn(256, 32)).argmax(1) == 0).sum())", 3.0, ""),
        ("right += int((model(torch.randn(256, 32)).argmax(1) == 0).sum())", 11.0, "AR224"),
    ],
)
def test_line_when_it_calls_something_then_it_is_given_the_time_of_work(
    line: str, waited_s: float, said: str
) -> None:
    """An evaluation on rank 0 alone was met at its one line in all looks, and was told of after 3 s as an endless loop."""
    busy = computing(3.5)
    stack = Stack((Place("/home/ann/train.py", 30, "evaluate", line),), is_main=True)
    assert code_of(waiting(waited_s), replace(busy, stacks=(stack,), stood_s=0.5)) == said
