"""Which device and backend does a rank take, with a torch.cuda of our own making?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from allranks.comm.devices import backend_for, pick_device
from allranks.core.errors import StartError
from allranks.core.place import Place


def place(local_rank: int, local_world_size: int = 4) -> Place:
    return Place(local_rank, 8, local_rank, local_world_size, 0, 2, "h", "torchrun", "", "a", 1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """Four GPUs that are not there; the list fills with the devices made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with mock.patch.dict(os.environ):
        for name in ("SLURM_STEP_ID", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"):
            os.environ.pop(name, None)
        yield chosen


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_device_when_there_are_gpus_then_the_local_ranks_is_made_current(
    gpus: list[torch.device], asked: str | None
) -> None:
    assert pick_device(place(3), asked) == torch.device("cuda:3")
    assert gpus == [torch.device("cuda:3")]


def test_device_when_asked_for_by_index_then_that_one(gpus: list[torch.device]) -> None:
    assert pick_device(place(3), "cuda:1") == torch.device("cuda:1")


def test_device_when_the_cpu_is_asked_for_then_cuda_is_not_touched(gpus: list[torch.device]) -> None:
    assert pick_device(place(3), "cpu") == torch.device("cpu")
    assert gpus == []


def test_device_when_the_local_rank_is_beyond_then_names_both(gpus: list[torch.device]) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    with pytest.raises(StartError) as caught:
        pick_device(place(5, 8))
    assert caught.value.code == "AR005"
    assert caught.value.what == "local rank 5 needs cuda:5, but this process sees 4 GPUs"
    assert caught.value.why == "8 ranks on this node; CUDA_VISIBLE_DEVICES=4,5,6,7"
    assert "--nproc 4" in caught.value.fix


def test_device_when_the_one_asked_for_is_not_there_then_says_how_many_are(gpus: list[torch.device]) -> None:
    with pytest.raises(StartError, match=r"device='cuda:4' was asked for, but this process sees 4 GPUs"):
        pick_device(place(0), "cuda:4")


def test_device_when_slurm_gave_each_task_one_gpu_then_cuda_0(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    os.environ["SLURM_STEP_ID"] = "0"
    os.environ["SLURM_GPUS_ON_NODE"] = "4"
    assert pick_device(place(3)) == torch.device("cuda:0")


def test_device_when_slurms_node_has_one_gpu_for_four_tasks_then_an_error(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    os.environ["SLURM_STEP_ID"] = "0"
    os.environ["SLURM_GPUS_ON_NODE"] = "1"
    with pytest.raises(StartError, match=r"local rank 3 needs cuda:3, but this process sees 1 GPU\b"):
        pick_device(place(3))


def test_device_when_there_is_no_gpu_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(place(3)) == torch.device("cpu")
    with pytest.raises(StartError, match=r"AR005 device='cuda' was asked for, but torch .* sees no GPU"):
        pick_device(place(3), "cuda")


def test_device_when_the_name_is_none_of_torchs_then_an_error() -> None:
    with pytest.raises(StartError, match=r"AR005 device='gpu' is no device of torch"):
        pick_device(place(0), "gpu")


@pytest.mark.parametrize(
    ("device", "asked", "backend"),
    [
        ("cpu", None, "gloo"),
        ("cuda:0", None, "cpu:gloo,cuda:nccl"),
        ("cuda:0", "nccl", "cpu:gloo,cuda:nccl"),  # the headers of run.sum travel on the CPU
        ("cuda:0", "gloo", "gloo"),
        ("cpu", "mpi", "mpi"),
    ],
)
def test_backend_then_it_can_carry_tensors_of_both_devices(
    device: str, asked: str | None, backend: str
) -> None:
    assert backend_for(torch.device(device), asked) == backend
