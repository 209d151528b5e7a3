"""What does a run hold? The state that its parts (feeding, stepping, evaluating, deciding, saving) share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from allranks import record
from allranks.comm.membership import Membership
from allranks.core.errors import UsageError
from allranks.core.place import Place
from allranks.data import RankLoader
from allranks.metrics import Sink
from allranks.train.slots import OptimizerSlot, Update
from allranks.train.step import Stepper
from allranks.wrap import Ema, Model, Precision, Window


class RunState:
    """The attributes of a run; see Run."""

    def __init__(
        self,
        *,
        place: Place,
        device: torch.device,
        membership: Membership,
        run_dir: Path,
        seed: int,
        precision: Precision,
        global_batch_size: int | None,
        accumulation_steps: int,
        micro_batch_size: int | None,
        make_sinks: Callable[[int | None], list[Sink]],
        sinks: tuple[Sink, ...] = (),
        num_cores: float = 1.0,
    ) -> None:
        self.place, self.device, self.run_dir, self.seed = place, device, run_dir, seed
        self.precision = precision
        self.num_cores = num_cores  # this rank's share of its host's
        self.global_batch_size, self.accumulation_steps, self.micro_batch_size = (
            global_batch_size,
            accumulation_steps,
            micro_batch_size,
        )
        self.epoch, self.num_epochs = 0, 0
        self.loaders: dict[str, RankLoader] = {}
        self.emas: dict[str, Ema] = {}
        self.on_update: list[Callable[[Update], None]] = []
        self._membership, self._make_sinks = membership, make_sinks
        self._sinks: list[Sink] | None = None  # made by the first run.log: trackers are slow to import
        self._resumed_at: int | None = None  # updates that the checkpoint had
        self._given_sinks = (
            sinks if place.rank == 0 else ()
        )  # the user's own, closed also if nothing was logged
        self._window = Window()
        self._stepper = Stepper(
            world_size=place.world_size, device=device, precision=precision, window=self._window
        )
        self._training_loader: RankLoader | None = None
        self._evaluating: list[RankLoader] = []  # evaluation loaders that are being iterated
        self._last_evaluated: RankLoader | None = None
        self._positions: dict[
            int, list[Any]
        ] = {}  # by loader: positions of the samples of its last evaluation pass
        self._steps_in_pass = 0
        self._barriers: dict[str, int] = {}
        self._record = record.recorder()
        self._logged: dict[str, Any] = {}  # on rank 0, the last value of each name: for the best checkpoint
        self._is_seeded_per_rank = False
        self._is_open = True
        self._stop_reason: str | None = None

    # -- who and where -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process among all ranks."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """Ranks in the job."""
        return self.place.world_size

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank writes."""
        return self.place.rank == 0

    @property
    def models(self) -> dict[str, Model]:
        """Models by name."""
        return self._stepper.models

    @property
    def slots(self) -> dict[str, OptimizerSlot]:
        """Optimizers with their schedulers and counters, by name."""
        return self._stepper.slots

    @property
    def updates(self) -> int:
        """Updates of the weights so far; with several optimizers, of the one that has most."""
        most = 0
        for slot in self._stepper.slots.values():  # asked for three times in a step
            if slot.updates > most:
                most = slot.updates
        return most

    def _after_iteration(self) -> None:
        """The loop comes back to a training loader for the next batch; see train/saving.py."""

    def _during_evaluation(self) -> None:
        """The loop comes back to an evaluation loader for the next batch; see train/saving.py."""

    def _on_end(self, loader: RankLoader) -> None:
        """An iteration of a loader is over."""

    def close(self, *, failing: bool = False) -> None:
        """End the run: loader workers and trackers are closed, and what is called afterwards is an error."""
        self._is_open = False
        with contextlib.ExitStack() as closing:  # the others are closed, too, if one fails to
            for part in (*(self._sinks or self._given_sinks), *self.loaders.values()):
                closing.callback(part.close)
            self._sinks, self._given_sinks = [], ()

    # -- guards --------------------------------------------------------------------------------------------------------------

    def _require_open(self, what: str) -> None:
        if not self._is_open:
            raise UsageError(
                "AR100",
                f"run.{what} after the run has ended",
                fix="keep it inside `with allranks.start(...) as run:`",
            )

    def _require_on_device(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.device != self.device and p.device.type != "meta":
                    raise UsageError(
                        "AR103",
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(p.shape)} on {p.device}, "
                        f"this rank computes on {self.device}",
                        fix="model = run.model(Net()) first, then the optimizer over model.parameters()",
                    )

    @staticmethod
    def _new_name(name: str, taken: Any) -> str:
        if name not in taken:
            return name
        return next(f"{name}{i}" for i in range(2, 10_000) if f"{name}{i}" not in taken)


def seed_generators(seed: int) -> None:
    """Seed python's, numpy's and torch's generators alike, from one number."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
