"""Is there ever a moment in a save at which a crash, or the system's refusal, leaves fewer good checkpoints than before?"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks import ckpt
from allranks.ckpt import Checkpoints, Retention, Snapshot
from allranks.core.errors import CheckpointError

CALLS = ("open", "write", "fsync", "close", "rename", "mkdir", "unlink", "rmdir")
# More than the buffer's 1 MB, so that a file takes several writes; each below 32,768 elements, where torch would use its thread
# pool, which does not survive a fork.
SIZES = {f"w{i}": 30_000 for i in range(10)}


def snapshot(step: int) -> Snapshot:
    weights = {name: torch.full((size,), float(step)) for name, size in SIZES.items()}
    return Snapshot(
        step=step, models={"model": weights}, training={"step": step}, this_rank=ckpt.random_states()
    )


def patch_calls(
    patch: pytest.MonkeyPatch, at: int, act: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
) -> list[str]:
    """Count the system calls of a save; `act` takes the place of number `at`."""
    seen: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == at:
                return act(name, real, args)
            return real(*args, **kwargs)

        patch.setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    return seen


def count_calls(tmp_path: Path) -> list[str]:
    prepare(tmp_path / "count")
    with pytest.MonkeyPatch.context() as patch:
        seen = patch_calls(patch, 0, lambda *_: None)
        save_the_third(tmp_path / "count")
    return list(seen)


def prepare(target: Path) -> None:
    for step in (1, 2):
        ckpt.save(target, snapshot(step), retention=Retention(keep=2))


def save_the_third(target: Path) -> None:
    Checkpoints(target, retention=Retention(keep=2)).save(snapshot(3), blocking=True)


def good_steps(target: Path) -> list[int]:
    store = ckpt.open_store(target)
    verified = [ckpt.verify(store, folder) for folder in store.folders() if ".tmp-" not in folder]
    return sorted(found.step for found, problems in verified if found is not None and not problems)


def crash_in_a_child(target: Path, at: int) -> int:
    pid = os.fork()
    if pid == 0:
        real_exit = os._exit

        def crash(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
            if name == "write":
                real(args[0], args[1][: len(args[1]) // 2])  # a torn write
            real_exit(9)

        patch_calls(pytest.MonkeyPatch(), at, crash)
        try:
            save_the_third(target)
        finally:
            real_exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_save_when_it_crashes_at_any_system_call_leaves_as_many_good_ones_as_before(tmp_path: Path) -> None:
    calls = count_calls(tmp_path)
    assert {"write", "fsync", "rename", "mkdir", "unlink", "rmdir"} <= set(calls), (
        "the save goes past our patches"
    )
    for at in range(1, len(calls) + 1):
        target = tmp_path / str(at)
        prepare(target)
        assert crash_in_a_child(target, at) == 9, f"call {at} of {len(calls)} was not reached"
        good = good_steps(target)
        assert len(good) >= 2 and good[-1] in (2, 3), (
            f"crash at call {at}, {calls[at - 1]}: only {good} are good"
        )
        after = Checkpoints(target, retention=Retention(keep=2))
        found = after.latest()
        assert found is not None and found.manifest.step == good[-1]
        assert found.weights()["w0"][0] == good[-1]
        # The next attempt clears what the crash left, and ends as if there had been none.
        after.save(snapshot(4), blocking=True)
        assert good_steps(target) == [good[-1], 4]
        assert not list(target.glob("*.tmp-*"))


@pytest.mark.parametrize("number", [28, 30, 5])  # no space left, read-only, input/output error
def test_save_when_the_system_refuses_any_call_names_it_and_loses_nothing(
    tmp_path: Path, number: int
) -> None:
    calls = count_calls(tmp_path)
    last = max(i for i, name in enumerate(calls, 1) if name == "rename")

    def refuse(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
        raise OSError(number, os.strerror(number))

    for at in [i for i in range(1, last + 1) if calls[i - 1] != "close"]:
        target = tmp_path / str(at)
        prepare(target)
        with pytest.MonkeyPatch.context() as patch:
            patch_calls(patch, at, refuse)
            with pytest.raises(CheckpointError, match=rf"AR608 .*AR614 .*{os.strerror(number)}"):
                save_the_third(target)
        assert good_steps(target) == [1, 2], f"call {at}, {calls[at - 1]}"
        save_the_third(target)
        assert good_steps(target) == [2, 3]


def test_save_when_what_was_written_does_not_verify_keeps_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path)
    rename = Path.rename

    def rename_and_damage(self: Path, target: Path) -> Path:
        if target.name == "step-00000003":
            (self / "model.safetensors").write_bytes(b"a disk that lies")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_and_damage)
    with pytest.raises(CheckpointError, match=r"AR608.*does not verify.*model\.safetensors is truncated"):
        save_the_third(tmp_path)
    assert good_steps(tmp_path) == [1, 2]
