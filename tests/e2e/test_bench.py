"""Does `allranks bench` measure a hand-written DDP script on several ranks, and tell what failed?"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

README = Path(__file__).parents[2] / "README.md"
SCRIPT = Path(__file__).parent / "scripts" / "bench_plain.py"


@pytest.mark.timeout(400)
def test_bench_when_script_is_plain_ddp_then_figures_of_each_setting_and_failures_told(
    tmp_path: Path,
) -> None:
    saved, plot = tmp_path / "figures.json", tmp_path / "curve.svg"
    command = [sys.executable, "-c", "import sys; from allranks.cli import main; main(sys.argv[1:])", "bench"]
    command += ["--ranks", "1,2", "--strategies", "memory,powersgd", "--rounds", "1"]
    command += ["--seconds", "0.3", "--most", "0.3", "--save", str(saved), "--plot", str(plot)]
    done = subprocess.run(
        [*command, str(SCRIPT), "--refuse-powersgd"], capture_output=True, text=True, timeout=390
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["ranks"], row["strategy"]): row for row in json.loads(saved.read_text())["rows"]}
    one, two, failed = rows[1, "script"], rows[2, "memory"], rows[2, "powersgd"]
    for row in (one, two):
        assert not row["failure"] and row["per_s"] > 0 and row["rss_mb"] > 50
        # 16 samples in each step of a rank
        assert row["per_s"] * row["step_s"] == pytest.approx(16 * row["ranks"], rel=0.2)
    assert two["efficiency"] == pytest.approx(two["per_s"] / 2 / one["per_s"])
    assert "no hooks here" in failed["failure"] and "2 ranks, powersgd: no figure" in done.stdout
    assert plot.read_text().startswith("<svg")


@pytest.mark.timeout(200)
def test_bench_when_script_uses_the_library_then_its_samples_count_and_it_writes_nothing(
    tmp_path: Path,
) -> None:
    (code, *_) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(code.replace("run.epochs(20)", "run.epochs(2000)"))
    command = [sys.executable, "-c", "import sys; from allranks.cli import main; main(sys.argv[1:])", "bench"]
    command += ["--ranks", "2", "--strategies", "ddp", "--rounds", "1", "--seconds", "0.3", "--most", "0.3"]
    done = subprocess.run(
        [*command, "--json", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=190
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    # 11 updates of 128 samples and one of 30 in an epoch
    assert row["per_s"] * row["step_s"] == pytest.approx(1438 / 12, rel=0.1), row
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]
