"""How do weights get into a module: those of a checkpoint, or of a file that some other tool wrote?"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from allranks.ckpt.checkpoints import load
from allranks.ckpt.finding import parse_folder
from allranks.ckpt.keys import does_not_fit, fit
from allranks.ckpt.reading import read_pt_file
from allranks.ckpt.stores import open_store
from allranks.ckpt.weights import read_weights
from allranks.core.errors import CheckpointError

_log = logging.getLogger(__name__)
# Where other tools keep the weights in a larger file.
_NESTED = ("state_dict", "model_state_dict", "model", "module", "net")


def put_weights(
    module: torch.nn.Module, weights: Mapping[str, Any], what: str, where: str, *, strict: bool = True
) -> None:
    """Load weights into a plain module; names may carry the prefixes of DDP, torch.compile and FSDP, on either side.

    Args:
        what: The module, for errors: "model 'teacher'".
        where: The file, for errors.
        strict: Everything must fit; otherwise what fits is loaded, and the rest is said in the log.

    Raises:
        CheckpointError: AR605 they do not fit; grouped by cause.
    """
    expected = module.state_dict()
    match = fit({n: _shape(w) for n, w in weights.items()}, {n: _shape(w) for n, w in expected.items()})
    if not match.is_complete:
        error = does_not_fit(match, what, where)
        if strict:
            raise error
        _log.warning("%s; loaded what fits, as strict=False says: %s", error.what, error.why)
    wrong = {name for name, _, _ in match.shapes}
    state = {e: weights[f] for f, e in match.names.items() if e not in wrong}
    module.load_state_dict(state, strict=match.is_complete)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def load_weights(module: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Load weights into a module from a file or a checkpoint folder, without running code. Not collective.

    Args:
        path: A .safetensors or .pt file of any tool, or a folder such as runs/digits/checkpoints/step-00001200; also a URL.
        strict: As in put_weights.

    Raises:
        CheckpointError: AR605 they do not fit, AR607 the file asks for code to be run, AR613 there is no such file, AR601 to AR604 a
            checkpoint's folder is damaged.
    """
    text = os.fspath(path).rstrip("/")
    parent, _, name = text.rpartition("/")
    if parse_folder(name) is not None:
        found = load(text)
        weights: Mapping[str, Any] = {**found.weights(), **found.training()["model_extra"].get("model", {})}
    else:
        weights = _read_file(parent or ".", name, text)
    put_weights(module, weights, f"this {type(module).__name__}", text, strict=strict)


def _read_file(parent: str, name: str, text: str) -> Mapping[str, Any]:
    store = open_store(parent)
    try:
        if name.endswith(".safetensors"):
            return read_weights(store, "", name)
        weights = read_pt_file(store, "", name)
    except FileNotFoundError as error:
        raise CheckpointError(
            "AR613", f"there is no file {text}", fix="the path of a .safetensors or .pt file"
        ) from error
    for key in _NESTED:
        inner = weights.get(key)
        if isinstance(inner, Mapping) and inner and all(isinstance(v, torch.Tensor) for v in inner.values()):
            return inner
    return weights
