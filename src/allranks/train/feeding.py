"""How do batches reach the loop, and how does the step know which micro-batch it is in?"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from allranks.core.errors import UsageError
from allranks.core.overrides import note
from allranks.core.seeds import derive_seed
from allranks.data import RankLoader, make_loader
from allranks.data.batch import MicroBatch
from allranks.train.state import RunState, seed_generators


class Feeding(RunState):
    """The part of a run that makes loaders and follows them."""

    def loader(
        self, source: Any, *, name: str = "", global_batch_size: int | None = None, **settings: Any
    ) -> RankLoader:
        """This rank's share of a data set or an existing DataLoader; see allranks.data.make_loader for the settings.

        Args:
            source: A map-style or iterable data set, or a DataLoader (whose settings are kept).
            name: For messages and checkpoints; "loader", "loader2", ... if not given.
            global_batch_size: Samples per update over all ranks; the run's if not given, else the DataLoader's batch_size.
        """
        self._require_open("loader")
        own_size = isinstance(source, DataLoader) or settings.get("batch_sampler") is not None
        if global_batch_size is None and not own_size:
            global_batch_size = self.global_batch_size
        if settings.get("micro_batch_size") is None:
            settings.setdefault("accumulation_steps", self.accumulation_steps)
        if settings.get("accumulation_steps", 1) == 1:
            settings.setdefault("micro_batch_size", self.micro_batch_size)
        name = self._new_name(name or "loader", self.loaders)
        loader = make_loader(
            source,
            rank=self.rank,
            world_size=self.world_size,
            num_cores=self.num_cores,
            device=self.device,
            seed=self.seed,
            global_batch_size=global_batch_size,
            epoch_of=lambda: self.epoch,
            name=name,
            **settings,
        )
        loader.on_batch, loader.on_end = partial(self._on_batch, loader), partial(self._on_end, loader)
        if own_size and global_batch_size is None:
            self._require_same_size(loader)
        if loader.is_training and loader.global_batch_size is not None:
            note("rank_batch_size", -(-loader.global_batch_size // self.world_size))
        loader.on_taken = self._after_iteration if loader.is_training else self._during_evaluation
        self.loaders[name] = loader
        return loader

    def _require_same_size(self, loader: RankLoader) -> None:
        """Where the source has a batch size and the run another one, the user has to say which he means to train with."""
        theirs, ours = loader.global_batch_size, self.global_batch_size
        if not loader.is_training or theirs is None or ours is None or theirs == ours:
            return
        raise UsageError(
            "AR130",
            f"allranks.start says global_batch_size={ours}, what {loader.name} is made from gives {theirs} samples per update",
            why="the batch size of a DataLoader is the number of samples per update over all ranks, as on one device",
            fix=f"run.loader(loader, global_batch_size={ours}), or {theirs}",
        )

    def _on_batch(self, loader: RankLoader, batch: MicroBatch) -> None:
        stepper, window = self._stepper, self._window
        if not loader.is_training:
            if loader not in self._evaluating:  # a new pass
                self._evaluating.append(loader)
                self._last_evaluated = loader
                self._positions[id(loader)] = []
                window.local += 1
            self._positions[id(loader)].append(batch.positions)
            return
        if not self._is_seeded_per_rank:
            self.seed_per_rank()
        if not stepper.stepped:
            self._require_stepped(loader)
        self._training_loader, self._last_evaluated = loader, None
        stepper.micro_batch, stepper.stepped = batch, False
        window.is_last, window.num_samples = batch.is_last, batch.num_samples

    def _require_stepped(self, loader: RankLoader) -> None:
        """A batch that others step and this rank leaves out would make them wait for ever: say so on this rank, now."""
        stepper = self._stepper
        batch = stepper.micro_batch
        if (
            batch is None
            or stepper.stepped
            or not self._steps_in_pass
            or self.world_size == 1
            or not batch.is_last
        ):
            return
        raise UsageError(
            "AR115",
            f"rank {self.rank} drew the batch after batch {batch.batch} of epoch {self.epoch} without run.step for it",
            why="the other ranks wait in that step's all-reduce for this rank",
            fix="run.step(None) instead of `continue`: the rank takes part with zero",
        )

    def _on_end(self, loader: RankLoader) -> None:
        if not loader.is_training:
            if loader in self._evaluating:
                self._evaluating.remove(loader)
                self._window.local -= 1
            else:  # a pass that had no batch for this rank
                self._last_evaluated, self._positions[id(loader)] = loader, []
            return
        if self._training_loader is loader:
            self._stepper.micro_batch, self._stepper.stepped = None, True
            self._training_loader, self._steps_in_pass = None, 0
            self._window.is_last, self._window.num_samples = True, None

    def seed_per_rank(self) -> None:
        """Part the ranks' random streams, for dropout and augmentation; called by itself when training begins."""
        self._is_seeded_per_rank = True
        seed_generators(derive_seed(self.seed, "rank", self.rank))
