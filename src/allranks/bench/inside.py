"""What counts in a rank of a trial? Runs the script, counts its steps and samples, and ends all ranks after the same step.

    python -m allranks.bench.inside SCRIPT [ARGS]        ALLRANKS_BENCH: what to do, as JSON

Rank 0 decides when the figure is stable, and writes after which step to end; no rank can be two steps ahead of it, since they share each
step's all-reduce.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from allranks.bench import strategies
from allranks.bench.stable import figure

VARIABLE = "ALLRANKS_BENCH"
WARM_STEPS = 3
WARM_SHARE = 0.2  # of the seconds of a trial
MARGIN_STEPS = 3
LOOK_EVERY_S = 0.25


class Meter:
    """Counts the steps of this rank.

    Args:
        folder: Of the trial, the same for all ranks.
        least_s: Seconds of steps that are wanted at least, after the warm-up.
        most_s: And at most, should the figure not become stable.
    """

    def __init__(self, folder: Path, rank: int, least_s: float, most_s: float) -> None:
        self.folder, self.rank, self.least_s, self.most_s = folder, rank, least_s, most_s
        self.samples = 0
        self.is_library = False  # the library counts: its loaders may use DataLoaders beneath
        self._optimizer: Any = None
        self._ends: list[float] = []
        self._counted: list[int] = []
        self._stop_at: int | None = None
        self._looked_at = 0.0
        self._stop_file = folder / "stop"

    def step_ended(self, optimizer: Any, *_: Any) -> None:
        """A hook of all optimizers; the first one that steps counts."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        now = time.perf_counter()
        self._ends.append(now)
        self._counted.append(self.samples)
        steps = len(self._ends)
        if self._stop_at is None:
            self._stop_at = self._decide(steps, now) if self.rank == 0 else self._told()
        if self._stop_at is not None and steps >= self._stop_at:
            self.leave("")

    def _measured(self) -> int:
        """The place of the first step that counts."""
        begun = self._ends[0] + WARM_SHARE * self.least_s
        return max(WARM_STEPS, next((i for i, end in enumerate(self._ends) if end >= begun), len(self._ends)))

    def _decide(self, steps: int, now: float) -> int | None:
        if steps <= WARM_STEPS or now - self._looked_at < LOOK_EVERY_S:
            return None
        self._looked_at = now
        ends = self._ends[self._measured() :]
        if len(ends) < 2 or ends[-1] - ends[0] < self.least_s:
            return None
        found = figure(ends)
        if ends[-1] - ends[0] < self.most_s and (found is None or not found.is_stable):
            return None
        making = self._stop_file.with_suffix(".new")
        making.write_text(str(steps + MARGIN_STEPS))
        making.rename(self._stop_file)
        return steps + MARGIN_STEPS

    def _told(self) -> int | None:
        return int(self._stop_file.read_text()) if self._stop_file.exists() else None

    def result(self, ended: str) -> dict[str, Any]:
        """What this rank measured."""
        first = min(self._measured(), len(self._ends) - 2) if len(self._ends) > 2 else 0
        cuda = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_initialized() else None
        return {
            "ended": ended,
            "ends": self._ends[first:],
            "samples": self._counted[-1] - self._counted[first] if self._ends else 0,
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "cuda_mb": cuda,
            "batches_known": self.samples > 0,
        }

    def write(self, ended: str) -> None:
        """Leave the result in the trial's folder."""
        making = self.folder / f"rank{self.rank}.new"
        making.write_text(json.dumps(self.result(ended)))
        making.rename(self.folder / f"rank{self.rank}.json")

    def leave(self, ended: str) -> None:
        """Write, and end this process without what the script would still do."""
        self.write(ended)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def count_samples(meter: Meter) -> None:
    """Count what training loops draw: from run.loader, else from any DataLoader, outside no_grad."""
    draw = DataLoader.__iter__

    def drawn(self: Any) -> Any:
        for batch in draw(self):
            if not meter.is_library and torch.is_grad_enabled():
                meter.samples += first_length(batch)
            yield batch

    DataLoader.__iter__ = drawn

    from allranks.train.feeding import Feeding

    on_batch = Feeding._on_batch

    def given(self: Any, loader: Any, batch: Any) -> None:
        if loader.is_training:
            if not meter.is_library:
                meter.is_library, meter.samples = True, 0
            meter.samples += batch.num_samples
        on_batch(self, loader, batch)

    Feeding._on_batch = given


def first_length(batch: Any) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return batch.shape[0] if batch.dim() else 0
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((n for value in values if (n := first_length(value))), 0)


def main(argv: list[str]) -> None:
    """Run the script of a trial in this rank."""
    wish = json.loads(os.environ[VARIABLE])
    rank = int(os.environ.get("RANK", "0"))
    meter = Meter(Path(wish["folder"]), rank, wish["least_s"], wish["most_s"])
    register_optimizer_step_post_hook(meter.step_ended)
    count_samples(meter)
    strategies.apply(wish["strategy"])
    script = argv[0]
    sys.argv = list(argv)
    sys.path[0] = str(Path(script).parent.absolute())
    runpy.run_path(script, run_name="__main__")
    meter.write("the script came to its end")


if __name__ == "__main__":
    main(sys.argv[1:])
