"""What model did this rank give to DistributedDataParallel? Its parameters, so that ranks can be compared.

Written before DDP compares them itself: where it finds a difference, one rank raises and the others see a closed
connection. One line of `<pid>.models.jsonl` per model, read by `read_models`. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allranks.record import compat, process
from allranks.record import layout as at


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter or buffer as DDP sees it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class ModelList:
    """One model: what Record.model counts and hashes."""

    number: int
    hash: int
    tensors: tuple[Tensor, ...]


def describe(module: Any) -> None:
    """Note `module` in the record; never raises."""
    try:
        rows = _rows(module)
    except Exception:  # noqa: BLE001 - lazy or strange modules: DDP itself will say what is wrong
        return
    digest = int.from_bytes(hashlib.blake2b(json.dumps(rows).encode(), digest_size=7).digest(), "little")
    words = process.WRITER.words
    number = words[at.W_MODELS] + 1
    path = process.side_path(at.MODELS_SUFFIX)
    if path is not None:
        try:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"number": number, "hash": digest, "tensors": rows}) + "\n")
        except OSError:
            pass  # a full /dev/shm: the hash still tells that they differ
    words[at.W_MODEL_PARAMS] = sum(not row[4] for row in rows)
    words[at.W_MODEL_HASH] = digest
    words[at.W_MODELS] = number


def _rows(module: Any) -> list[list[Any]]:
    ignored = compat.not_for_ddp(module)  # each rank may have its own of these
    parameters = [
        [name, list(p.shape), str(p.dtype).removeprefix("torch."), bool(p.requires_grad), False]
        for name, p in module.named_parameters()
        if (name if "." in name else f".{name}") not in ignored  # so does DDP call those of the module itself
    ]
    buffers = [
        [name, list(b.shape), str(b.dtype).removeprefix("torch."), False, True]
        for name, b in module.named_buffers()
        if name not in ignored
    ]
    return parameters + buffers


def read_models(path: Path) -> list[ModelList]:
    """The models in a `<pid>.models.jsonl`, oldest first; none if there is no such file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut short: the process was killed
        tensors = (
            Tensor(name, tuple(shape), dtype, grad, buf) for name, shape, dtype, grad, buf in row["tensors"]
        )
        found.append(ModelList(row["number"], row["hash"], tuple(tensors)))
    return found
