"""How do weights become a safetensors file, and come back onto one device?

Written here and not by safetensors' own save: that needs the whole file in memory first, and does not tell the checksum.
The format: 8 bytes length of a JSON header, the header, the tensors one after the other, little-endian.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import BinaryIO

import safetensors
import safetensors.torch
import torch

from allranks.ckpt.stores import LocalStore, Store
from allranks.core.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_weights(file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; tensors that share memory (tied weights) are written under each of their names.

    Raises:
        CheckpointError: AR606 a dtype that safetensors does not have.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(
                "AR606",
                f"weight {name} cannot be saved: safetensors has no {tensor.dtype}",
                fix="keep it as float32 in state_dict()",
            )
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        if tensor.numel():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_weights(store: Store, folder: str, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU: mapped from the disk, so only what is used is read.

    Raises:
        CheckpointError: AR601 it is not a safetensors file.
    """
    try:
        if isinstance(store, LocalStore):
            return safetensors.torch.load_file(store.path(folder, name))
        with store.open(folder, name) as file:
            return safetensors.torch.load(file.read())
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            "AR601", f"{store.path(folder, name)} is not a safetensors file: {error}"
        ) from error
