"""Is the host named whose link is slower than the others', from what its own connections hold back?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import Hosts

JOB = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(45):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.timeout(150)
def test_link_of_one_of_three_hosts_that_is_slow_then_that_host_is_named(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(3)
    hosts.do("rate", hosts.names[1], "30mbit")
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(JOB)
    nodes = [
        hosts.start(
            name, "allranks", "run", "--nnodes", "3", "--node-rank", str(number), "--master-addr", hosts.address(1),
            "--master-port", "29500", "--run-dir", run, script, env={"OMP_NUM_THREADS": "1"},
        )
        for number, name in enumerate(hosts.names)
    ]  # fmt: skip
    done = [node.finish(timeout_s=130) for node in nodes]
    assert [d.code for d in done] == [0, 0, 0], done[0].story()
    told = hosts.run(hosts.names[0], "allranks", "report", run, "--json")
    causes = {cause["code"]: cause for cause in json.loads(told.out)["times"]["causes"]}
    assert "AR815" in causes, (causes, told.story())
    assert causes["AR815"]["ranks"] == [1]
    assert f"the link of {hosts.names[1]} is the slow one" in causes["AR815"]["title"]
