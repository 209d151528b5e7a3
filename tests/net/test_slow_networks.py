"""Two hosts with two ranks each: do gradients cross the network once, do all ranks get the same, and is a dead rank noticed?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.cluster import Hosts

JOB = """
import hashlib, logging, os, signal, sys
import torch, allranks
from torch import nn

logging.basicConfig(level=logging.INFO)

def train(updates, **settings):
    with allranks.start(sys.argv[1], global_batch_size=8, threads=1, resume="never") as run:
        torch.manual_seed(0)
        model = run.model(nn.Sequential(nn.Linear(16, 200), nn.Tanh(), nn.Linear(200, 1)), **settings)
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for update in range(updates):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(update))[2 * run.rank : 2 * run.rank + 2]
            run.step((model(x) - x.sum(1, keepdim=True)).square().mean())
            if run.rank == 3 and update == 3 and os.environ["WHO_DIES"] == "now":
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

def say(name, weights):
    print(name, hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12], f"{weights.double().norm().item():.5f}", flush=True)

os.environ["WHO_DIES"] = ""
for number, (name, settings) in enumerate({
    "alone": {"shared_memory": False}, "hosts": {}, "bf16": {"compress": "bf16"}, "powersgd": {"compress": "powersgd"},
    "apart": {"sync_every": 2},
}.items()):
    os.environ["MASTER_PORT"] = str(29500 + number)
    say(name, train(4, **settings))
os.environ["MASTER_PORT"], os.environ["WHO_DIES"] = "29520", "now"
train(8)
"""


@pytest.mark.timeout(200)
def test_ranks_when_two_share_each_host_then_same_weights_and_a_dead_one_is_noticed(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    hosts = make_hosts(2)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    ranks = [
        hosts.start(
            hosts.names[rank // 2],
            "python",
            script,
            tmp_path / "run",
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % 2),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": hosts.address(1),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(4)
    ]
    done = [rank.finish(timeout_s=180) for rank in ranks]
    said = [dict(line.split(" ", 1) for line in d.out.splitlines()) for d in done]
    assert all(s == said[0] for s in said), [d.story() for d in done]
    assert set(said[0]) == {"alone", "hosts", "bf16", "powersgd", "apart"}, done[0].story()
    assert "2 hosts; on each, one rank uses the network" in done[0].err
    norms = {name: float(text.split()[1]) for name, text in said[0].items()}
    assert norms["hosts"] == pytest.approx(norms["alone"], abs=1e-3)
    assert norms["bf16"] == pytest.approx(norms["alone"], abs=1e-2)
    # The rank beside the one that was killed names it; the others' errors follow from that one's.
    assert done[3].code == -9 or done[3].code == 137, done[3].story()
    assert "AR050 rank 3 ended" in done[2].err, done[2].story()
    assert all(d.code not in (0, None) for d in done), [d.story() for d in done]
