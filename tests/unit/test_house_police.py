"""Do the police catch what a test leaves behind? Each leak is a test of a pytest run of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from support.command import RunCommand

ROOT = Path(__file__).resolve().parents[2]
LEAKS = {
    "environment variables left changed: ['LEFT']": "import os; os.environ['LEFT'] = '1'",
    "threads left running: ['left']": (
        "import threading; threading.Thread(target=threading.Event().wait, name='left', daemon=True).start()"
    ),
    "processes left running": "import subprocess; subprocess.Popen(['sleep', '60'])",
    "files left outside tmp_path: ['left-by-a-test']": (
        "import os; from pathlib import Path; Path(os.environ['POLICED_TREE'], 'left-by-a-test').touch()"
    ),
    "the process group was left initialized": (
        "import torch.distributed as dist;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    ),
}


def test_police_when_a_test_leaks_then_it_fails_with_the_leak(
    tmp_path: Path, run_command: RunCommand
) -> None:
    tests = [f"def test_{index}():\n    {leak}\n" for index, leak in enumerate(LEAKS.values())]
    (tmp_path / "test_leaks.py").write_text("\n".join([*tests, "def test_clean():\n    pass\n"]))
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['support.police']\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\n")
    tree = tmp_path / "tree"  # not the repository: other tests run beside this one
    tree.mkdir()
    command = sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path
    done = run_command(*command, env={"POLICED_TREE": str(tree)})
    missed = [message for message in LEAKS if message not in done.out]
    assert not missed and f"{len(LEAKS) + 1} passed, {len(LEAKS)} errors" in done.out, done.story()
