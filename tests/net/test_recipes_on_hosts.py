"""Does the same recipe run on two hosts, started with torchrun's flags on each?"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import Hosts

pytestmark = pytest.mark.timeout(200)

DIGITS = Path(__file__).resolve().parents[2] / "recipes" / "digits.py"


def test_digits_when_run_on_two_hosts_then_learned_and_told_once(make_hosts: Callable[[int], Hosts]) -> None:
    hosts = make_hosts(2)
    where = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        hosts.address(1),
        "--master-port",
        "29500",
    )
    # One thread: each host believes that all cores are its own.
    started = [
        hosts.start(
            host, "allranks", "run", *where, "--node-rank", str(node), DIGITS, "--epochs", "5",
            env={"OMP_NUM_THREADS": "1"},
        )
        for node, host in enumerate(hosts.names)
    ]  # fmt: skip
    first, second = (each.finish(timeout_s=90) for each in started)
    assert first.code == 0 and second.code == 0, f"{first.story()}\n{second.story()}"
    assert not first.left_behind + second.left_behind
    (percent,) = re.findall(r"test accuracy (\d+\.\d+)% after 5 epochs on 2 ranks", first.out)
    assert float(percent) > 85, first.story()
    assert "test accuracy" not in second.out, second.story()
