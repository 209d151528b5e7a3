"""How is a checkpoint read, by each rank what it needs, and never with code run?"""

from __future__ import annotations

import pickle
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from allranks.ckpt.finding import Problem
from allranks.ckpt.manifest import Manifest
from allranks.ckpt.plain import from_plain
from allranks.ckpt.stores import Store
from allranks.ckpt.weights import read_weights
from allranks.ckpt.writing import TRAINING, rank_file, weights_file
from allranks.core.errors import CheckpointError

_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint that was found and verified; nothing is read before it is asked for."""

    store: Store
    folder: str
    manifest: Manifest
    passed_over: tuple[Problem, ...] = ()
    """Newer ones that were not good."""

    @property
    def path(self) -> str:
        """The name people know it by."""
        return self.store.path(self.folder).rstrip("/")

    def model_names(self) -> list[str]:
        """The models that were saved."""
        found = (re.match(r"model(?:-(.+))?\.safetensors\Z", name) for name in self.manifest.files)
        return sorted(m.group(1) or "model" for m in found if m)

    def weights(self, name: str = "model") -> dict[str, torch.Tensor]:
        """The weights of one model, on the CPU, mapped from the disk where it is one."""
        return read_weights(self.store, self.folder, weights_file(name))

    def training(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return read_pt(self.store, self.folder, TRAINING)

    def rank(self, rank: int) -> dict[str, Any]:
        """What only this rank had; the world size of the save must match."""
        return read_pt(self.store, self.folder, rank_file(rank))


def read_pt(store: Store, folder: str, name: str) -> dict[str, Any]:
    """Read a .pt file of plain values that allranks wrote.

    Raises:
        CheckpointError: AR607 it asks for code to be run, AR601 it is no such file.
    """
    return from_plain(read_pt_file(store, folder, name))


def read_pt_file(store: Store, folder: str, name: str) -> dict[str, Any]:
    """Read a .pt file that holds a dict, whoever wrote it, as it is and without running code.

    Raises:
        CheckpointError: AR607 it asks for code to be run, AR601 it is no such file.
        FileNotFoundError: It is not there.
    """
    where = store.path(folder, name)
    try:
        with store.open(folder, name) as file, warnings.catch_warnings():
            # A bare pickle (what torch wrote before 1.6) is never ours.
            if file.read(len(_ZIP)) != _ZIP:
                raise CheckpointError("AR601", f"{where} is not what torch.save writes: it is no zip file")
            file.seek(0)
            # Of a stranger's file torch warns before it refuses; the refusal is enough.
            warnings.simplefilter("ignore")
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)|Unsupported (?:global|operand|class)[^.\n]*", str(error))
        raise CheckpointError(
            "AR607",
            f"{where} was not loaded: it asks for code to be run ({found.group(1) or found.group(0) if found else 'unknown'})",
            why="weights and training state need no code: the file holds objects of classes, or was made to do harm",
            fix="if you trust it, load it where it comes from and save its state_dict() there; otherwise do not load it anywhere",
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError("AR601", f"{where} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError("AR601", f"{where} holds a {type(loaded).__name__}, not a dict")
    return loaded
