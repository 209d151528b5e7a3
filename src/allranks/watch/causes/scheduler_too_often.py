"""AR738 scheduler-too-often: a learning rate scheduler is stepped as often as there are ranks, for each step of the optimizer."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import first_of_each, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR738", "scheduler-too-often"


def find(case: Case) -> Verdict | None:
    """By what each rank counted."""
    found = first_of_each(case, "scheduler")
    if found is None:
        return None
    one, ranks = found
    rates = ", ".join(f"{r:g}" for r in one["rates"])
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: {one['name']} is stepped {one['per_step']} times for each optimizer step: once per rank",
        ranks,
        where=[place(one)],
        facts=[
            f"{one['calls']} steps of the scheduler for {one['steps']} of the optimizer; the learning rate is {rates} now",
            f"each rank has a scheduler of its own: the schedule ends {one['per_step']} times too soon",
        ],
        fix="one scheduler.step() for each optimizer.step(), on every rank",
        step=one["steps"],
    )
