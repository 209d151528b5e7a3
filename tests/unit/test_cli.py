"""Does the command answer to the ways in which one calls it?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from allranks import cli


def test_version_when_asked_as_other_commands_are_then_it_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("allranks ")


def test_module_when_run_by_python_then_it_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "allranks", "run", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: allranks run")
    assert not done.stderr
