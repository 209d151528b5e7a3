"""Is each fault of a real job named: who, what, where? And is nothing said of jobs that are well?

The default run takes a representative few; ALLRANKS_FAULTS=all takes them all (20 minutes).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from support.command import StartCommand
from support.needs import need

sys.path.insert(0, str(Path(__file__).parent))

from running import HERE, Fault, run

FEW = (
    "raises_while_others_fail_first",
    "stopped",
    "loader_stuck",
    "guarded_barrier",
    "keeps_an_error_quiet",
    "other_line",
    "own_loss_logged",
    "drifts",
    "no_set_epoch",
    "through_module",
    "uneven",
    "unused_on_one",
)
QUIET_FEW = ("checkpoint_on_rank_zero", "groups_of_ranks", "skips_together")


def scripts(folder: str, few: tuple[str, ...]) -> list[Path]:
    """All of them, or the few."""
    found = sorted(p for p in (HERE / folder).glob("*.py") if p.stem != "job")
    return found if os.environ.get("ALLRANKS_FAULTS") == "all" else [p for p in found if p.stem in few]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("path", scripts("scripts", FEW), ids=lambda path: path.stem)
def test_fault_when_it_strikes_then_it_is_named(
    path: Path, start_command: StartCommand, tmp_path: Path
) -> None:
    fault = Fault.read(path)
    need(f"needs {fault.missing}", not fault.missing)
    told = run(fault, start_command, tmp_path)
    assert not told.problems, f"{told.problems}\n{told.text}"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("path", scripts("quiet", QUIET_FEW), ids=lambda path: path.stem)
def test_job_when_it_is_well_then_nothing_is_said(
    path: Path, start_command: StartCommand, tmp_path: Path
) -> None:
    told = run(Fault.read(path), start_command, tmp_path, until_end=True)
    assert (told.code, told.exit_code) == ("", 0), told.text
