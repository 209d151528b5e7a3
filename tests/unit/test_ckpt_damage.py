"""Is every damage of a checkpoint noticed and named, and the one before taken? Can a stranger's checkpoint run anything?"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from allranks import ckpt
from allranks.ckpt import Checkpoints, Snapshot, manifest
from allranks.core.errors import CheckpointError

NUM_DAMAGES = 1000


def save_two(target: Path) -> Path:
    for step in (1, 2):
        weights = {"w": torch.full((20,), float(step))}
        ckpt.save(
            target,
            Snapshot(step=step, models={"model": weights}, training={"n": step}, this_rank={"r": [step]}),
        )
    return target / "step-00000002"


def flip_a_bit(file: Path, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return f"bit flipped in byte {at}"


def truncate(file: Path, rng: random.Random) -> str:
    size = rng.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"truncated to {size}"


def delete(file: Path, rng: random.Random) -> str:
    file.unlink()
    return "deleted"


def append(file: Path, rng: random.Random) -> str:
    with file.open("ab") as out:
        out.write(rng.randbytes(rng.randrange(1, 50)))
    return "something appended"


def zero_a_block(file: Path, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randrange(1, 512))
    if not any(data[at:end]):
        return flip_a_bit(file, rng)
    data[at:end] = bytes(end - at)
    file.write_bytes(data)
    return f"bytes {at} to {end} zeroed"


def take_from_the_other_step(file: Path, rng: random.Random) -> str:
    other = file.parent.parent / "step-00000001" / file.name
    if other.read_bytes() == file.read_bytes():
        return flip_a_bit(file, rng)
    shutil.copyfile(other, file)
    return "of another step"


DAMAGES = (flip_a_bit, truncate, delete, append, zero_a_block, take_from_the_other_step)


def test_latest_when_a_file_is_damaged_in_any_way_names_it_and_takes_the_one_before(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    originals = {p.name: p.read_bytes() for p in newest.iterdir()}
    store = ckpt.open_store(tmp_path)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    for number in range(NUM_DAMAGES):
        name = rng.choice(sorted(originals))
        did = rng.choice(DAMAGES)(newest / name, rng)
        found = ckpt.find_latest(store)
        story = f"damage {number} of seed {seed}: {name} {did}"
        assert found.folder == "step-00000001", story
        assert [p.folder for p in found.problems] == ["step-00000002"], story
        assert name in found.problems[0].text and found.problems[0].code in ("AR601", "AR602", "AR603"), story
        (newest / name).write_bytes(originals[name])
    assert ckpt.find_latest(store).folder == "step-00000002"


def test_every_single_byte_of_a_manifest_is_covered_by_its_checksum(tmp_path: Path) -> None:
    whole = (save_two(tmp_path) / "manifest.json").read_bytes()
    assert manifest.parse(whole).step == 2
    for at in range(len(whole)):
        for changed in (
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
            whole[:at] + whole[at + 1 :],
            whole[:at],
        ):
            with pytest.raises(CheckpointError, match="AR601"):
                manifest.parse(changed)


def test_latest_when_all_are_damaged_lists_what_is_wrong_with_each(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    (newest / "training.pt").unlink()
    truncate(tmp_path / "step-00000001" / "model.safetensors", random.Random(1))
    (tmp_path / "step-00000003.tmp-12-1").mkdir()
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).latest()
    text = str(caught.value)
    assert caught.value.code == "AR600"
    assert "step-00000003.tmp-12-1: the save was not finished" in text
    assert "step-00000002: training.pt is missing (AR603)" in text
    assert "step-00000001: model.safetensors is truncated" in text


def test_latest_when_there_is_nothing_or_only_a_first_unfinished_save_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").latest() is None
    (tmp_path / "some" / "step-00000001.tmp-12-1").mkdir(parents=True)
    assert Checkpoints(tmp_path / "some").latest() is None


def test_latest_when_a_manifest_is_gone_is_no_fresh_start(tmp_path: Path) -> None:
    ckpt.save(tmp_path, Snapshot(step=1))
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"AR600[\s\S]*there is no manifest\.json \(AR602\)"):
        Checkpoints(tmp_path).latest()


def test_folder_when_renamed_to_another_step_is_named(tmp_path: Path) -> None:
    save_two(tmp_path).rename(tmp_path / "step-00000009")
    found = ckpt.find_latest(ckpt.open_store(tmp_path))
    assert found.folder == "step-00000001"
    assert "is of step 2, in a folder named for step 9" in found.problems[0].text


def test_load_when_the_folder_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    save_two(tmp_path)
    with pytest.raises(CheckpointError, match=r"AR613 [\s\S]*step-00000001, step-00000002"):
        ckpt.load(tmp_path / "step-00000007")


def test_load_when_damaged_says_what_is_wrong(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    flip_a_bit(newest / "rank-0.pt", random.Random(3))
    with pytest.raises(CheckpointError, match=r"AR601 .*rank-0\.pt is damaged"):
        ckpt.load(newest)


def sign(folder: Path, **changes: object) -> None:
    """Make the manifest fit the folder's files again, as an attacker would."""
    body = json.loads((folder / "manifest.json").read_text()) | changes
    if "files" not in changes:
        body["files"] = {
            p.name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
            for p in folder.iterdir()
            if p.name != "manifest.json"
        }
    del body["checksum"]
    text = json.dumps(body, indent=1).encode()[: -len(b"\n}")]
    end = f',\n "checksum": "{hashlib.sha256(text).hexdigest()}"\n}}\n'
    (folder / "manifest.json").write_bytes(text + end.encode())


class Malicious:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("is_legacy", [False, True])
@pytest.mark.parametrize("name", ["training.pt", "rank-0.pt"])
def test_strangers_checkpoint_when_loaded_runs_nothing(tmp_path: Path, name: str, is_legacy: bool) -> None:
    newest = save_two(tmp_path)
    proof = tmp_path / "executed"
    if is_legacy:
        (newest / name).write_bytes(pickle.dumps({"x": Malicious(proof)}))
    else:
        torch.save({"x": Malicious(proof)}, newest / name)
    sign(newest)
    found = ckpt.load(newest)
    refusal = (
        "AR601 .*is not what torch.save writes" if is_legacy else "AR607 .*it asks for code to be run .*mkdir"
    )
    with pytest.raises(CheckpointError, match=refusal):
        found.training() if name == "training.pt" else found.rank(0)
    assert not proof.exists()
    # The same bytes do run where they are loaded without care: the attack is a real one.
    pickle.loads((newest / name).read_bytes()) if is_legacy else torch.load(newest / name, weights_only=False)
    assert proof.exists()


def test_strangers_manifest_when_it_points_elsewhere_is_refused(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    (tmp_path / "secret").write_bytes(b"x")
    for name in ("../secret", "/etc/passwd", "..", "a/b", ".hidden"):
        sign(newest, files={name: {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}})
        _, problems = ckpt.verify(ckpt.open_store(tmp_path), newest.name)
        assert "is no plain file name" in problems[0].text


def test_manifest_of_a_newer_format_is_named_with_both_versions(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    sign(newest, version=2)
    with pytest.raises(CheckpointError, match=r"AR604 .*version 2; this allranks reads .* version 1"):
        ckpt.load(newest)


def test_weights_when_not_safetensors_are_named(tmp_path: Path) -> None:
    newest = save_two(tmp_path)
    (newest / "model.safetensors").write_bytes(b"\xff" * 100)
    sign(newest)
    with pytest.raises(CheckpointError, match=r"AR601 .*is not a safetensors file"):
        ckpt.load(newest).weights()
