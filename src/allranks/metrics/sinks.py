"""What is a tracker? Anything with log(values, step) and close(); rank 0 alone calls it."""

from __future__ import annotations

import json
import math
import numbers
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from allranks.core.errors import UsageError, warn_once


@runtime_checkable
class Sink(Protocol):
    """Receives what run.log is given. Weights & Biases: `class W: log = lambda s, v, step: wandb.log(v, step=step)` and a close."""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Take the values of one update; `step` is the number of updates so far."""

    def close(self) -> None:
        """Write what is left; called once, also after an exception."""


class JsonLines:
    """One JSON object a line in RUN/metrics.jsonl, handed to the system when log returns."""

    OWN = ("step", "time")

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Append one line: step, wall time in seconds, and the values; NaN and infinity as strings, since JSON has none."""
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        for name, value in values.items():
            if name in self.OWN:  # lost neither, and no training ended for a name
                warn_once(
                    "AR162", f"log({name}=...) is in metrics.jsonl as {name}_: {name} is the line's own"
                )
                name += "_"
            line[name] = _jsonable(value)
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


class TensorBoard:
    """Scalars as TensorBoard events beside metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Add the numbers as scalars and the strings as text; lists and dicts stand in metrics.jsonl only."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def default_sinks(run_dir: Path, tensorboard: bool | None) -> list[Sink]:
    """metrics.jsonl, and TensorBoard where it is installed (None), wanted (True) or not (False)."""
    board = None if tensorboard is False else _tensorboard(run_dir / "tensorboard", tensorboard is True)
    lines = JsonLines(run_dir / "metrics.jsonl")
    return [lines] if board is None else [lines, board]


def _tensorboard(folder: Path, is_wanted: bool) -> TensorBoard | None:
    try:
        return TensorBoard(folder)
    except ImportError as error:
        if is_wanted:
            raise UsageError(
                "AR162",
                "tensorboard=True, but it cannot be imported",
                why=str(error),
                fix="pip install 'allranks[tensorboard]'",
            ) from error
    except (AttributeError, TypeError) as error:  # an installed one that does not fit numpy or protobuf
        if is_wanted:
            raise
        warn_once("AR162", f"no TensorBoard events: {error}; tensorboard=False makes this go away")
    return None


def check_sinks(sinks: Iterable[Any]) -> None:
    """Refuse what is no tracker before the training, not at its first value.

    Raises:
        UsageError: AR162.
    """
    for sink in sinks:
        if isinstance(sink, type) or not isinstance(sink, Sink):
            missing = [name for name in ("log", "close") if not callable(getattr(sink, name, None))]
            what = f"has no {' and no '.join(missing)}" if missing else "is a class, not an object"
            raise UsageError(
                "AR162",
                f"sinks=({sink!r}): it {what}",
                fix="an object with log(values, step) and close()",
            )


def plain_value(name: str, value: Any) -> Any:
    """A logged value as a Python number or string, or a list or dict of such.

    Raises:
        UsageError: AR162 it is something that cannot be written down.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.item() if value.numel() == 1 else value.tolist()
    elif isinstance(value, (np.ndarray, np.generic)) or (
        hasattr(value, "item") and getattr(value, "ndim", 1) == 0
    ):
        value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value.item()
    if isinstance(value, (str, bool, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain_value(f"{name}[{k!r}]", v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(name, v) for v in value]
    if isinstance(value, numbers.Real):  # Fraction
        return float(value)
    if isinstance(value, numbers.Number) and not isinstance(value, numbers.Complex):  # Decimal
        return float(str(value))
    raise UsageError(
        "AR162",
        f"log({name}=...) got a value of type {type(value).__name__}",
        fix="a number, a string, a tensor, or a list or dict of these",
    )
