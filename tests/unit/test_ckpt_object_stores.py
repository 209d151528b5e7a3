"""Do checkpoints on object stores keep the promises that renames keep on a disk?"""

from __future__ import annotations

import os
from collections.abc import Iterator

import fsspec
import pytest
import torch

from allranks import ckpt
from allranks.ckpt import Checkpoints, Retention, Snapshot
from allranks.core.errors import CheckpointError


def snapshot(step: int) -> Snapshot:
    weights = {"w": torch.full((1000,), float(step))}
    return Snapshot(step=step, models={"model": weights}, training={"n": step}, this_rank={"r": [step]})


@pytest.fixture
def memory() -> Iterator[str]:
    url = f"memory://bucket-{os.urandom(4).hex()}/run"
    yield url
    fsspec.filesystem("memory").store.clear()


def test_object_store_when_saved_comes_back_and_keeps_its_newest(memory: str) -> None:
    checkpoints = Checkpoints(memory, retention=Retention(keep=2))
    for step in (1, 2, 3):
        checkpoints.save(snapshot(step))
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None and found.path == f"{memory}/step-00000003"
    assert found.weights()["w"][0] == 3 and found.training()["n"] == 3 and found.rank(0)["r"] == [3]
    assert checkpoints.store.folders() == ["step-00000002", "step-00000003"]
    assert ckpt.load(found.path).manifest.step == 3


def test_object_store_when_cut_short_at_any_object_shows_no_checkpoint(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(memory, snapshot(1))
    store = type(ckpt.open_store(memory))
    for method, name in (
        ("create", "rank-0.pt"),
        ("create", "model.safetensors"),
        ("create", "training.pt"),
        ("put", "manifest.json"),
    ):
        real = getattr(store, method)

        def stop_at(self: object, folder: str, file: str, *args: object, real=real, name=name) -> object:
            if file == name:
                raise KeyboardInterrupt  # as near to a kill as one gets here: no clean-up of ours runs
            return real(self, folder, file, *args)

        with monkeypatch.context() as patch:
            patch.setattr(store, method, stop_at)
            patch.setattr(store, "remove", lambda *_: None)
            with pytest.raises(CheckpointError, match="AR608"):
                ckpt.save(memory, snapshot(2))
        found = Checkpoints(memory).latest()
        assert found is not None and found.manifest.step == 1
        assert all(p.code == "AR602" for p in found.passed_over)
    checkpoints = Checkpoints(memory)
    checkpoints.save(snapshot(2), blocking=True)
    found = checkpoints.latest()
    assert found is not None and found.training()["n"] == 2


def test_object_store_when_only_a_first_save_was_cut_short_begins_anew(memory: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{memory}/step-00000001/training.pt", b"half")
    assert Checkpoints(memory).latest() is None


def test_object_store_when_damaged_is_named(memory: str) -> None:
    for step in (1, 2):
        ckpt.save(memory, snapshot(step))
    files = fsspec.filesystem("memory")
    data = bytearray(files.cat_file(f"{memory}/step-00000002/model.safetensors"))
    data[-1] ^= 1
    files.pipe_file(f"{memory}/step-00000002/model.safetensors", bytes(data))
    found = ckpt.find_latest(ckpt.open_store(memory))
    assert found.folder == "step-00000001" and "model.safetensors is damaged" in found.problems[0].text


def test_object_store_of_an_unknown_scheme_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"AR614 checkpoints cannot go to nowhere://x"):
        Checkpoints("nowhere://x")


def test_two_ranks_on_an_object_store_make_one_checkpoint(memory: str) -> None:
    session = Checkpoints(memory).new_session()
    ranks = [Checkpoints(memory, rank=r, world_size=2, session=session) for r in range(2)]
    for rank, checkpoints in enumerate(ranks):
        checkpoints.save(Snapshot(step=1, this_rank={"mine": rank}))
    for checkpoints in ranks:
        checkpoints.close()
    found = ranks[0].latest()
    assert found is not None and [found.rank(r)["mine"] for r in range(2)] == [0, 1]
    assert sorted(ckpt.open_store(memory).files(found.folder)) == [
        "manifest.json",
        "rank-0.pt",
        "rank-1.pt",
        "training.pt",
    ]
