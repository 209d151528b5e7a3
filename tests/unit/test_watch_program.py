"""Are the programs named that a rank waits for?"""

from __future__ import annotations

from allranks.watch.causes import program
from allranks.watch.evidence import Rank, Worker


def test_programs_that_a_rank_waits_for_then_named_without_their_options() -> None:
    commands = "/usr/bin/mysql -psecret orders", "/opt/venv/bin/python prepare.py --key secret", ""
    children = (
        *(
            Worker(pid, state="S", wchan="do_wait", command=command)
            for pid, command in enumerate(commands, 7)
        ),
        Worker(10, command="python train.py", is_loader=True),
    )
    assert program._programs(Rank(0, workers=children)) == [
        "process 7 is a child of it: mysql, in the kernel's do_wait",
        "process 8 is a child of it: python prepare.py, in the kernel's do_wait",
        "process 9 is a child of it: a program without a name, in the kernel's do_wait",
    ]
