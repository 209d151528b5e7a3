"""Does scripts/gpu_check say so where there is no GPU, and do its checks work where they need none?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script where no GPU can be seen."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=env, capture_output=True, text=True)


@pytest.mark.timeout(300)
def test_gpu_check_when_there_is_no_gpu_then_says_so_and_fails() -> None:
    done = run()
    assert done.returncode == 2 and "no CUDA GPU here" in done.stdout and "Nothing was checked" in done.stdout


@pytest.mark.timeout(600)
def test_gpu_check_when_tried_on_the_cpu_then_table_of_what_needs_no_gpu() -> None:
    done = run("--device", "cpu", "--only", "fused", "events", "--patience", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fused" in done.stdout and "passed" in done.stdout and "needs CUDA" in done.stdout
