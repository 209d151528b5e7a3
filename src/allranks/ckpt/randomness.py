"""Which random states does a process have, and how do they come back exactly?"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from allranks.core.errors import CheckpointError


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """The states of python's, NumPy's and torch's global generators, and of this rank's CUDA device.

    Args:
        device: This rank's device; other devices' generators are other ranks' business.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Set every generator as it was.

    Raises:
        CheckpointError: AR618 names the generator that did not take its state.
    """
    setters = {
        "python": lambda state: random.setstate(_as_tuples(state)),
        "numpy": np.random.set_state,
        "torch": lambda state: torch.set_rng_state(state.cpu()),
    }
    if device is not None and device.type == "cuda" and "cuda" in states:
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state.cpu(), device)
    for name, restore in setters.items():
        try:
            restore(states[name])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                "AR618",
                f"the state of {name}'s random generator does not come back: {type(error).__name__}: {error}",
                fix='start("...", resume="never") to begin anew, or resume from an older checkpoint',
            ) from error


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
