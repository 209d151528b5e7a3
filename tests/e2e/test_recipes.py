"""Do the recipes run as their first lines say: under allranks run, under torchrun, and alone?"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from support.command import Done, RunCommand, command_path
from support.needs import need_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
# Where other work fills the cores, two threads that wait for each other crawl.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FEWER_EPOCHS = ("--epochs", "10")  # 98.6 % here
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def accuracy_of(done: Done) -> float:
    """The test accuracy that a recipe printed last, 0 to 1."""
    assert done.code == 0, done.story()
    found = re.findall(r"test accuracy (\d+\.\d+)%", done.out)
    assert found, done.story()
    return float(found[-1]) / 100


def metrics_of(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_digits_when_run_on_two_ranks_then_accurate_and_told_once(
    allranks: RunCommand, tmp_path: Path
) -> None:
    done = allranks("run", "--nproc", "2", RECIPES / "digits.py", timeout_s=170)
    assert accuracy_of(done) >= 0.97
    assert "on 2 ranks" in done.out and done.out.count("samples/s") == 1, done.story()
    (run_dir,) = (Path(found) for found in re.findall(r"run directory (\S+)", done.out))
    assert (tmp_path / run_dir).is_relative_to(tmp_path), done.story()
    assert len(metrics_of(tmp_path / run_dir)) == 20
    assert {path.name for path in (tmp_path / run_dir / "ranks").iterdir()} >= {"rank0.log", "rank1.log"}


def test_digits_when_run_by_torchrun_then_as_accurate(run_command: RunCommand) -> None:
    torchrun = (command_path("torchrun"), "--standalone", "--nproc-per-node", "2")
    done = run_command(*torchrun, RECIPES / "digits.py", *FEWER_EPOCHS, timeout_s=170)
    assert accuracy_of(done) >= 0.97
    assert "on 2 ranks" in done.out, done.story()


def test_digits_when_run_alone_then_as_accurate(run_command: RunCommand) -> None:
    done = run_command(sys.executable, RECIPES / "digits.py", *FEWER_EPOCHS, timeout_s=170, env=ONE_THREAD)
    assert accuracy_of(done) >= 0.97
    assert "on 1 rank" in done.out, done.story()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fashion_when_run_for_a_few_steps_then_learns(
    allranks: RunCommand, tmp_path: Path, num_ranks: int
) -> None:
    need_folder(FASHION_MNIST, "dataset-fashion-mnist")
    few = ("--epochs", "1", "--steps", "30", "--run-dir", "runs/fashion")
    command = ("run", "--nproc", str(num_ranks), RECIPES / "fashion.py", *few)
    done = allranks(*command, timeout_s=170, env=ONE_THREAD)
    # 10 classes: 10 % is chance. 30 updates reached 69 % here.
    assert accuracy_of(done) >= 0.5
    (last,) = metrics_of(tmp_path / "runs" / "fashion")
    assert last["accuracy"] == pytest.approx(accuracy_of(done), abs=1e-4)


def test_fashion_when_the_data_are_not_there_then_says_how_to_get_them(
    run_command: RunCommand, tmp_path: Path
) -> None:
    done = run_command(sys.executable, RECIPES / "fashion.py", "--data", tmp_path)
    assert done.code == 1
    assert "apt-get install dataset-fashion-mnist" in done.err, done.story()


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_recipe_then_short_enough_to_read(recipe: Path) -> None:
    assert len(recipe.read_text().splitlines()) <= 150
