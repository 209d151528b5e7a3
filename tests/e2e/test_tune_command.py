"""Does `allranks tune` find the one setting that is plainly wrong, and leave the user's files alone?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

JOB = """
import sys, time
import torch, allranks

class SlowToRead(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.005)  # 80 ms a batch, whatever else the machine does
        return torch.full((4,), float(index)), index % 2

with allranks.start("mine", global_batch_size=16) as run:
    model = run.model(torch.nn.Linear(4, 2))
    run.optimizer(torch.optim.SGD(model.parameters(), lr=1e-9))
    for epoch in run.epochs(9):
        for x, y in run.loader(SlowToRead(), shuffle=True, num_workers=1):
            run.step(torch.nn.functional.cross_entropy(model(x), y))
"""


@pytest.mark.timeout(400)
def test_tune_when_one_worker_cannot_keep_up_then_more_are_found_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(JOB)
    command = [
        sys.executable,
        "-c",
        "from allranks.cli import main; main()",
        "tune",
        "--json",
        "--minutes",
        "4",
    ]
    # Each trial is a start of its own: as few as show it, that is one step up, and both once more. The minutes are for a slow machine.
    command += ["--seconds", "0.5", "--only", "num_workers", "--try", "num_workers=1,4", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["best"]["settings"] == {"num_workers": 4}, found
    assert found["gain"] > 1.02 and found["trials"] <= 5
    assert "as it is:" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]
