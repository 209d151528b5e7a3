"""Did a test leave something behind? (Autouse; a leak fails the test that made it, not a later one.)"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import children_of, describe, kill, wait_until_gone

# The repository; another folder where the police itself is tested.
TREE = Path(os.environ.get("POLICED_TREE", Path(__file__).resolve().parents[2]))
# pytest's own, changed around every phase of a test.
PYTEST_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "PYTEST_VERSION", "TORCHINDUCTOR_CACHE_DIR"})
PATIENCE_S = 1.5
# Caches of tools; everything else that appears in the tree was written by the test.
IGNORED_IN_TREE = frozenset({".git", ".venv", "__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache"})


@pytest.fixture(autouse=True)
def _run_away_from_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path (such as runs/...) lands in tmp_path."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_variable_is_left(_run_away_from_the_tree: None) -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} - PYTEST_VARIABLES
    os.environ.update({name: before[name] for name in changed if name in before})
    for name in changed - before.keys():
        del os.environ[name]
    assert not changed, f"environment variables left changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + PATIENCE_S
    while (left := _threads_beside(before)) and time.monotonic() < deadline:
        left[0].join(0.05)
    assert not left, f"threads left running: {[thread.name for thread in left]}"


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(children_of(os.getpid()))
    yield
    left = [
        pid for pid in children_of(os.getpid()) if pid not in before and pid not in _multiprocessings_own()
    ]
    left = wait_until_gone(left, PATIENCE_S)
    told = [describe(pid) for pid in left]
    for pid in left:
        kill(pid)
    assert not left, f"processes left running: {told}"


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the process group was left initialized")


@pytest.fixture(autouse=True)
def _no_file_is_left_in_the_tree() -> Iterator[None]:
    before = _tree()
    yield
    assert not (new := sorted(_tree() - before)), f"files left outside tmp_path: {new}"


def _threads_beside(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before and thread.is_alive()]


def _multiprocessings_own() -> set[int | None]:
    """The fork server and the resource tracker live as long as the test run."""
    server = getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)  # type: ignore[attr-defined]
    tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    return {server, tracker}


def _tree() -> set[str]:
    """The top of the repository: where a run directory or a log would appear."""
    return {entry.name for entry in TREE.iterdir() if entry.name not in IGNORED_IN_TREE}
