"""Does a checkpoint come back as it was saved, while the loop goes on, one at a time, with its errors?"""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from allranks import ckpt
from allranks.ckpt import Checkpoints, Retention, Session, Snapshot
from allranks.ckpt.hold import Holder
from allranks.ckpt.stores import open_store
from allranks.core.errors import CheckpointError, UsageError


def make_training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    adam = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    adam.step()
    return net, adam


def make_snapshot(step: int = 7) -> Snapshot:
    net, adam = make_training()
    return Snapshot(
        step=step,
        epoch=2,
        models={"model": net.state_dict()},
        training={"optimizers": {"main": adam.state_dict()}},
        this_rank={"random": ckpt.random_states()},
        metrics={"accuracy": 0.5},
    )


def test_save_then_latest_gives_back_every_value(tmp_path: Path) -> None:
    net, adam = make_training()
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(make_snapshot(), blocking=True)
    found = checkpoints.latest()
    assert found is not None
    assert (found.manifest.step, found.manifest.epoch, found.manifest.world_size) == (7, 2, 1)
    assert found.path == str(tmp_path / "checkpoints" / "step-00000007")
    weights = found.weights()
    assert weights.keys() == net.state_dict().keys()
    assert all(torch.equal(weights[k], v) for k, v in net.state_dict().items())
    state = found.training()["optimizers"]["main"]
    assert state["param_groups"] == adam.state_dict()["param_groups"]
    for index, entries in adam.state_dict()["state"].items():
        assert all(torch.equal(state["state"][index][k], v) for k, v in entries.items())


def test_weights_when_saved_load_with_plain_safetensors_and_torch(tmp_path: Path) -> None:
    folder = ckpt.save(tmp_path, make_snapshot())
    fresh, _ = make_training()
    fresh.load_state_dict(safetensors.torch.load_file(f"{folder}/model.safetensors"))
    plain = torch.load(f"{folder}/training.pt", weights_only=True)
    assert set(plain["optimizers"]["main"]) == {"state", "param_groups"}


def test_weights_of_all_dtypes_tied_empty_and_strided_come_back(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    weights = {
        "transposed": base.t(),
        "tied.a": base,
        "tied.b": base,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        **{
            str(t): base.to(t)
            for t in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64)
        },
    }
    ckpt.save(tmp_path, Snapshot(step=1, models={"model": weights, "teacher.2": {"w": base}}))
    found = ckpt.load(tmp_path / "step-00000001")
    back = found.weights()
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in weights.items())
    assert found.model_names() == ["model", "teacher.2"]
    assert torch.equal(found.weights("teacher.2")["w"], base)


def test_values_beyond_torch_come_back_with_their_types(tmp_path: Path) -> None:
    values = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "empty": np.zeros((0, 2)),
        "scalar": np.float32(1.5),
        "deque": deque([1, 2], maxlen=3),
        "set": {1, "a"},
        "ordered": OrderedDict(b=1, a=(2, [3.0, None, b"x"])),
        "infinite": [float("inf"), -0.0, 2**70],
        1: "a number as a key",
        "__allranks__": "a name of ours",
    }
    ckpt.save(tmp_path, Snapshot(step=1, training={"values": values}))
    back = ckpt.load(tmp_path / "step-00000001").training()["values"]
    assert list(back) == list(values)
    for key in ("array", "empty"):
        assert back[key].dtype == values[key].dtype and np.array_equal(back[key], values[key])
    assert back["scalar"] == 1.5 and back["scalar"].dtype == np.float32
    assert back["deque"] == values["deque"] and back["deque"].maxlen == 3
    rest = [k for k in values if k not in ("array", "empty", "scalar")]
    assert {k: back[k] for k in rest} == {k: values[k] for k in rest}
    assert type(back["ordered"]) is OrderedDict


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda x: x, "function"),
        (Opaque(), "Opaque"),
        (Opaque, "type"),
        (np.array([Opaque()]), "numpy.ndarray"),
        (torch.empty(1, device="meta"), "meta tensor"),
    ],
)
def test_save_when_a_value_needs_code_names_where_it_lies(tmp_path: Path, value: object, named: str) -> None:
    state = Snapshot(step=1, training={"tracked": {"sampler": {"fns": [1, value]}}})
    with pytest.raises(
        CheckpointError, match=r"AR606 training\.tracked\.sampler\.fns\[1\].*" + named
    ) as caught:
        Checkpoints(tmp_path).save(state)
    assert caught.value.code == "AR606"
    assert not list(tmp_path.iterdir())


def test_state_when_changed_after_save_is_saved_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: go_on.wait(30) and write(fd, data))
    weight, groups = torch.zeros(1000), {"lr": [0.1]}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Snapshot(step=1, models={"model": {"w": weight}}, training={"groups": groups}))
    assert checkpoints.is_busy
    weight.fill_(5)
    groups["lr"].append(0.2)
    go_on.set()
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None
    assert found.weights()["w"].sum() == 0
    assert found.training()["groups"] == {"lr": [0.1]}


def test_second_save_when_the_first_is_not_written_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: go_on.wait(30) and write(fd, data))
    caplog.set_level(logging.INFO)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_snapshot(1))
    wait = checkpoints._background.wait
    monkeypatch.setattr(checkpoints._background, "wait", lambda: go_on.set() or wait())
    saved = checkpoints.save(make_snapshot(2))
    checkpoints.close()
    assert saved.waited_s > 0
    assert "AR617 the save of step 2 waited" in caplog.text and "for step-00000001" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_buffers_when_saved_again_are_used_again_and_hold_the_new_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    weight = torch.zeros(4)
    for step in range(1, 4):
        weight.fill_(step)
        checkpoints.save(Snapshot(step=step, models={"model": {"w": weight}}))
    checkpoints.close()
    buffers = checkpoints._holder._buffers
    assert [b.tolist() for b in buffers.values()] == [[3.0] * 4]
    assert [ckpt.load(tmp_path / f"step-0000000{s}").weights()["w"][0].item() for s in (1, 2, 3)] == [1, 2, 3]


def test_writer_when_it_fails_raises_at_the_next_check_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_snapshot(1), blocking=True)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        checkpoints.save(make_snapshot(2))
        with pytest.raises(CheckpointError, match=r"AR608 .*step-00000002.*AR614.*No space left") as caught:
            checkpoints.wait()
    assert isinstance(caught.value.__cause__, CheckpointError)
    checkpoints.check()
    # What failed leaves nothing behind, and the next save is a save like any other.
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    checkpoints.save(make_snapshot(3))
    checkpoints.close()
    found = checkpoints.latest()
    assert found is not None and found.manifest.step == 3


def test_save_when_a_step_is_there_already_writes_beside_it(tmp_path: Path) -> None:
    ckpt.save(tmp_path, Snapshot(step=5, training={"n": 1}))
    ckpt.save(tmp_path, Snapshot(step=5, training={"n": 2}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000005-again1"]
    found = Checkpoints(tmp_path).latest()
    assert found is not None and found.training()["n"] == 2


def test_manifest_names_versions_time_commit_and_checksums(tmp_path: Path) -> None:
    folder = Path(ckpt.save(tmp_path, make_snapshot()))
    text = json.loads((folder / "manifest.json").read_text())
    assert (
        text["format"] == "allranks checkpoint"
        and text["version"] == 1
        and text["metrics"] == {"accuracy": 0.5}
    )
    assert {"allranks", "torch", "python", "host", "written_at"} <= text["about"].keys()
    for name, entry in text["files"].items():
        assert entry["size"] == (folder / name).stat().st_size
    assert {p.name for p in folder.iterdir()} == {*text["files"], "manifest.json"}


def test_random_states_when_restored_repeat_the_same_numbers(tmp_path: Path) -> None:
    def draw() -> tuple[object, ...]:
        numbers = np.random.rand(2).tolist(), np.random.normal()
        return random.random(), random.gauss(0, 1), numbers, torch.rand(2).tolist(), torch.randn(1).item()

    random.gauss(0, 1)
    np.random.normal()  # each leaves a second number in the generator's hand
    folder = ckpt.save(tmp_path, Snapshot(step=1, this_rank=ckpt.random_states()))
    drawn = draw()
    ckpt.restore_random_states(ckpt.load(folder).rank(0))
    assert draw() == drawn


def test_random_states_when_one_is_broken_names_the_generator() -> None:
    states = ckpt.random_states() | {"numpy": {"bit_generator": "MT19937", "state": {}}}
    with pytest.raises(CheckpointError, match=r"AR618 the state of numpy's random generator"):
        ckpt.restore_random_states(states)


def test_checkpoints_of_several_ranks_without_a_session_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need rank 0's session"):
        Checkpoints(tmp_path, world_size=2)


def two_ranks(target: Path, wait_s: float = 30) -> list[Checkpoints]:
    zero = Checkpoints(target)
    session = zero.new_session()
    return [
        Checkpoints(target, rank=r, world_size=2, session=session, wait_for_ranks_s=wait_s) for r in range(2)
    ]


def test_ranks_when_all_write_make_one_checkpoint_with_every_ranks_state(tmp_path: Path) -> None:
    ranks = two_ranks(tmp_path)
    for step in (1, 2):
        for rank, checkpoints in enumerate(ranks):
            state = Snapshot(step=step, training={"from": rank}, this_rank={"mine": rank * 10 + step})
            checkpoints.save(state)
    for checkpoints in ranks:
        checkpoints.close()
    found = ranks[1].latest()
    assert found is not None and found.manifest.world_size == 2
    assert found.training()["from"] == 0
    assert [found.rank(r)["mine"] for r in range(2)] == [2, 12]
    assert sorted(p.name for p in Path(found.path).iterdir()) == [
        "manifest.json",
        "rank-0.pt",
        "rank-1.pt",
        "training.pt",
    ]


def test_rank_zero_when_another_rank_does_not_write_names_it(tmp_path: Path) -> None:
    zero, _ = two_ranks(tmp_path, wait_s=0.05)
    with pytest.raises(CheckpointError, match=r"AR609 rank 1 of 2 did not write") as caught:
        zero.save(make_snapshot(), blocking=True)
    assert "disk of its own node" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_rank_zero_when_the_job_fails_does_not_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allranks.ckpt.writing._GRACE_S", 0.05)
    zero, _ = two_ranks(tmp_path, wait_s=1000)
    zero.save(make_snapshot())
    zero.close(failing=True)
    assert not zero.is_busy and not list(tmp_path.iterdir())


def test_slip_of_an_earlier_attempt_is_not_taken_for_this_one(tmp_path: Path) -> None:
    _, one = two_ranks(tmp_path)
    one.save(make_snapshot(), blocking=True)
    left = next(tmp_path.iterdir())
    # Somebody starts again: the same step, another session; the old slip lies under the new working name.
    zero = Checkpoints(
        tmp_path, world_size=2, session=Session("aaaa", ()), wait_for_ranks_s=0.05, retention=Retention()
    )
    left.rename(tmp_path / "step-00000007.tmp-aaaa-1")
    with pytest.raises(CheckpointError, match="AR609 rank 1"):
        zero.save(make_snapshot(), blocking=True)


def test_leftovers_of_killed_saves_are_removed_after_the_next_good_one(tmp_path: Path) -> None:
    (tmp_path / "step-00000003.tmp-0123-1").mkdir()
    (tmp_path / "step-00000003.tmp-0123-1" / "training.pt").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    checkpoints.save(make_snapshot(4), blocking=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step-00000004"]


def test_files_when_another_rank_renames_one_during_the_listing_are_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.make("step")
    store.put("step", "rank-0.json", b"12")
    real = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda place: [*real(place), place / ".rank-1.json.part"])
    assert store.files("step") == {"rank-0.json": 2}
    assert store.files("not-there") == {}


def test_slip_when_rank_0_publishes_as_soon_as_it_sees_it_then_this_rank_is_not_troubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.make("step.tmp")
    real = Path.rename

    def rename(place: Path, to: Path) -> Path:
        moved = real(place, to)
        if to.name == "rank-1.json":
            real(tmp_path / "step.tmp", tmp_path / "step")
        return moved

    monkeypatch.setattr(Path, "rename", rename)
    store.put("step.tmp", "rank-1.json", b"12", lasting=False)
    assert store.files("step") == {"rank-1.json": 2}


def test_holder_when_helpers_copy_too_has_every_byte_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allranks.ckpt.hold.usable_cores", lambda: 4)
    before = threading.active_count()
    holder = Holder()
    state = {f"w{n}": torch.randn(n, 1_000_003) for n in (1, 2)} | {"small": torch.ones(3)}
    for _ in range(3):
        for tensor in state.values():
            tensor.add_(1)
        holder.begin()
        copies = {name: holder.copy(tensor, name) for name, tensor in state.items()}
        holder.finish()
        assert all(torch.equal(copies[name], tensor) for name, tensor in state.items())
        assert threading.active_count() == before + 3
    holder.close()
    deadline = time.monotonic() + 20
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
