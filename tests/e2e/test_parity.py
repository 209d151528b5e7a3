"""Does `allranks parity` say the right thing at the command line? tests/ranks/test_parity_causes.py goes through the causes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import RunCommand

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

SCRIPTS = Path(__file__).resolve().parents[1] / "fixtures" / "parity"


def test_parity_when_an_allranks_script_is_run_then_equal_and_its_run_directory_is_left_alone(
    allranks: RunCommand, tmp_path: Path
) -> None:
    done = allranks("parity", "--updates", "5", SCRIPTS / "with_allranks.py", "--weighted", timeout_s=200)
    assert done.code == 0, done.story()
    assert "equal for 5 updates on 1 rank and on 2" in done.out, done.story()
    assert not list(tmp_path.iterdir()), "files were left"


def test_parity_when_a_plain_ddp_script_is_broken_then_json_names_the_tensor_and_the_cause(
    allranks: RunCommand, tmp_path: Path
) -> None:
    options = ("--updates", "3", "--json", "--plot", "losses.svg")
    done = allranks("parity", *options, SCRIPTS / "plain_ddp.py", "--break", "AR710", timeout_s=200)
    assert done.code == 1, done.story()
    cause = json.loads(done.out)["cause"]
    assert (cause["code"], cause["update"], cause["tensor"], cause["rank"]) == ("AR710", 1, "first.weight", 1)
    assert (tmp_path / "losses.svg").read_text().startswith("<svg")


def test_parity_when_the_script_does_not_train_then_said_with_its_output(
    allranks: RunCommand, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('no data here')\n")
    done = allranks("parity", "train.py", timeout_s=100)
    assert done.code == 3, done.story()
    assert "AR720" in done.err and "no data here" in done.err, done.story()
