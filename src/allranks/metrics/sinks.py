"""What is a tracker? Anything with log(values, step) and close(); rank 0 alone calls it."""

from __future__ import annotations

import json
import math
import numbers
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from allranks.core.errors import UsageError


@runtime_checkable
class Sink(Protocol):
    """Receives what run.log is given. Weights & Biases: `class W: log = lambda s, v, step: wandb.log(v, step=step)` and a close."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Take the values of one update; `step` is the number of updates so far."""

    def close(self) -> None:
        """Write what is left; called once, also after an exception."""


class JsonLines:
    """One JSON object a line in RUN/metrics.jsonl, on disk when log returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Append one line: step, wall time in seconds, and the values; NaN and infinity as strings, since JSON has none."""
        line = {"step": step, "time": round(time.time(), 3)} | {k: _jsonable(v) for k, v in values.items()}
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


class TensorBoard:
    """Scalars as TensorBoard events beside metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Add the numbers as scalars and the strings as text."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif isinstance(value, numbers.Number):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def default_sinks(run_dir: Path, tensorboard: bool | None) -> list[Sink]:
    """metrics.jsonl, and TensorBoard where it is installed (None), wanted (True) or not (False)."""
    sinks: list[Sink] = [JsonLines(run_dir / "metrics.jsonl")]
    if tensorboard is False:
        return sinks
    try:
        sinks.append(TensorBoard(run_dir / "tensorboard"))
    except ImportError:
        if tensorboard:
            raise UsageError(
                "AR162",
                "tensorboard=True, but it is not installed",
                fix="pip install 'allranks[tensorboard]'",
            ) from None
    return sinks


def plain_value(name: str, value: Any) -> Any:
    """A logged value as a Python number, string or list.

    Raises:
        UsageError: AR162 it is something that cannot be written down.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return value.item() if value.numel() == 1 else value.tolist()
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if isinstance(value, (numbers.Number, str, bool, list, tuple, dict, type(None))):
        return value
    raise UsageError(
        "AR162",
        f"log({name}=...) got a {type(value).__name__}",
        fix="a number, a tensor, a string or a list of them",
    )
