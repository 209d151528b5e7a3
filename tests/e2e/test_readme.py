"""Do the blocks of README.md and of the start page run, and print what the pages say?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.command import RunCommand

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
START = ROOT / "docs" / "start" / "first-10-minutes.md"


def python_block(page: Path, containing: str) -> str:
    """The one Python block of a page that contains a text."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if containing in block)
    return block


def test_readme_script_when_run_on_two_ranks_then_learns(allranks: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(python_block(README, "allranks.start("))
    done = allranks("run", "--nproc", "2", "train.py", timeout_s=120)
    assert done.code == 0, done.story()
    (metrics,) = tmp_path.glob("runs/train-*/metrics.jsonl")
    last = metrics.read_text().splitlines()[-1]
    assert float(re.findall(r'"accuracy": ([0-9.]+)', last)[0]) > 0.9, last


def test_uneven_script_of_the_readme_when_run_then_the_cause_is_named(
    allranks: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "uneven.py").write_text(python_block(README, "dist.barrier()"))
    done = allranks("run", "--nproc", "2", "uneven.py", timeout_s=60)
    assert done.code != 0, done.story()
    page = README.read_text()
    told = [line.split(" ")[0] for line in (done.out + done.err).splitlines() if re.match(r"AR\d{3} ", line)]
    assert told and all(f"\n{code} " in page for code in told), done.story()
    assert "uneven.py:14" in done.err and "dist.barrier()" in done.err, done.story()


def test_ordinary_script_of_the_start_page_when_one_rank_raises_then_the_story_is_the_pages(
    allranks: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "ordinary.py").write_text(python_block(START, "init_process_group"))
    done = allranks("run", "--nproc", "2", "ordinary.py", timeout_s=60)
    assert done.code == 1, done.story()
    told = done.out + done.err
    # What stands on the page, without what differs from run to run: host, pids, times, paths.
    for words in ("rank 1", "ordinary.py", "ZeroDivisionError"):
        assert words in told, f"{words!r} is not told\n{done.story()}"
    assert told.count("Traceback (most recent call last)") == 1, done.story()


def test_readme_commands_then_exist_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", README.read_text()))
    assert {"demo", "test"} <= named <= targets
