"""Do checkpoints on s3:// behave as on a disk? Against moto's server on loopback, in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.needs import need

SCRIPT = """
import os
import fsspec, torch
from moto.server import ThreadedMotoServer
from allranks.ckpt import Checkpoints, Retention, Snapshot, load, random_states

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
os.environ |= dict(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1")
os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
files = fsspec.filesystem("s3")
files.mkdir("bucket")

def snapshot(step):  # 8 MB: more than one part of a multipart upload
    weights = {"w": torch.full((2_000_000,), float(step))}
    return Snapshot(step=step, models={"model": weights}, training={"n": step}, this_rank=random_states())

session = Checkpoints("s3://bucket/run").new_session()
ranks = [Checkpoints("s3://bucket/run", retention=Retention(keep=2), rank=r, world_size=2, session=session) for r in range(2)]
for step in (1, 2, 3):
    for rank in ranks:
        rank.save(snapshot(step))
for rank in ranks:
    rank.close()
print("folders", ranks[0].store.folders())
found = ranks[1].latest()
assert found.weights()["w"].eq(3).all() and found.training()["n"] == 3 and found.rank(1)
print("path", found.path, sorted(files.ls("bucket/run/step-00000003", detail=False)))
files.pipe_file("bucket/run/step-00000003/training.pt", b"x")
found = ranks[0].latest()
print("after damage", found.manifest.step, found.passed_over[0].text)
files.rm_file("bucket/run/step-00000002/manifest.json")
try:
    ranks[0].latest()
except Exception as error:
    print("none left", error.code)
server.stop()
"""


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_s3_when_saved_pruned_and_damaged_behaves_as_a_disk_does(tmp_path: Path) -> None:
    for module, package in (("s3fs", "allranks[s3]"), ("moto", "moto[server]")):
        need(f"needs {module}: pip install '{package}'", importlib.util.find_spec(module) is not None)
    (tmp_path / "s3.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "s3.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folders, path, damaged, none_left = done.stdout.splitlines()
    assert folders == "folders ['step-00000002', 'step-00000003']"
    names = ("manifest.json", "model.safetensors", "rank-0.pt", "rank-1.pt", "training.pt")
    assert path == f"path s3://bucket/run/step-00000003 {[f'bucket/run/step-00000003/{n}' for n in names]}"
    assert damaged.startswith("after damage 2 training.pt is truncated: 1 of")
    assert none_left == "none left AR600"
