"""Does the report of a real job say what it did? A plain DDP script under `allranks run`, one of its ranks late."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import RunCommand
from support.trace_rules import check

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

SLEEP_S, STEPS = 0.2, 20
SCRIPT = f"""
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DDP(nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({STEPS}):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 1:
        time.sleep({SLEEP_S})
dist.destroy_process_group()
"""


def test_report_of_a_job_with_a_late_rank_then_says_where_its_time_went(
    allranks: RunCommand, tmp_path: Path
) -> None:
    script, run = tmp_path / "late.py", tmp_path / "run"
    script.write_text(SCRIPT)
    done = allranks("run", "--nproc", "2", "--run-dir", run, script, timeout_s=100)
    assert done.code == 0, done.story()
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    told = allranks("report", run, "--json", "--html", page, "--trace", trace)
    assert told.code == 0, told.story()
    found = json.loads(told.out)
    assert found["end"]["state"] == "ended" and found["run"]["world_size"] == 2
    times = found["times"]
    assert times["steps"] == STEPS
    for rank in times["ranks"]:
        assert sum(rank["parts_s"].values()) == pytest.approx(rank["step_s"], rel=0.05)
    early, late = (rank["parts_s"] for rank in times["ranks"])
    assert late["python"] >= 0.9 * SLEEP_S and late["waiting"] < early["waiting"]
    assert times["came_last"]["1"] > times["came_last"]["0"]
    assert late["python"] > early["python"]
    arrows = [event["pid"] for event in check(json.loads(trace.read_text())) if event["ph"] == "f"]
    assert arrows.count(1) > arrows.count(0)
    assert '"stack":{' in page.read_text() and '"steps":[{' in page.read_text()
