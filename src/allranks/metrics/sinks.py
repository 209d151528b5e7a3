"""What is a tracker? Anything with log(values, step) and close(); rank 0 alone calls it."""

from __future__ import annotations

import json
import math
import numbers
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from allranks.core.errors import UsageError, warn_once

METRICS = "metrics.jsonl"


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
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if _ends_in_half_a_line(path):
            self._file.write("\n")
        self._before = self.count = count_lines(path)

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
        self.count += 1

    def cut_back(self, keep: int) -> int:
        """As cut_lines; what was logged through this object stays."""
        self._file.close()
        cut = cut_lines(self._path, keep, self._before)
        self._before, self.count = self._before - cut, self.count - cut
        self._file = self._path.open("a", encoding="utf-8", buffering=1)
        return cut

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_in_half_a_line(path: Path) -> bool:
    """Of a process that was killed while it wrote."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def count_lines(path: Path) -> int:
    """Lines of a file; 0 if it is not there."""
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except FileNotFoundError:
        return 0


def cut_lines(path: Path, keep: int, end: int | None = None) -> int:
    """Take the lines from number `keep` to `end` (to the last) out of a file: they tell of updates that are done again.

    Returns:
        How many these were.
    """
    there = count_lines(path)
    if (end := there if end is None else end) <= keep:
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    making = path.with_name(f".{path.name}.cut")
    # Half a line at the end, of a killed process, goes too.
    making.write_bytes(b"".join(lines[:keep] + lines[end:there]))
    making.replace(path)
    return end - keep


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

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        """Write into `folder`; events after update `resumed_at` that are there are not shown any more."""
        from torch.utils.tensorboard import SummaryWriter

        more: dict[str, Any] = {} if resumed_at is None else {"purge_step": resumed_at + 1}
        self._writer = SummaryWriter(str(folder), **more)

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


def default_sinks(run_dir: Path, tensorboard: bool | None, resumed_at: int | None = None) -> list[Sink]:
    """metrics.jsonl, and TensorBoard where it is installed (None), wanted (True) or not (False)."""
    board = (
        None
        if tensorboard is False
        else _tensorboard(run_dir / "tensorboard", tensorboard is True, resumed_at)
    )
    lines = JsonLines(run_dir / METRICS)
    return [lines] if board is None else [lines, board]


def _tensorboard(folder: Path, is_wanted: bool, resumed_at: int | None) -> TensorBoard | None:
    try:
        return TensorBoard(folder, resumed_at=resumed_at)
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
