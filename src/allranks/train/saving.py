"""When does a run save, and how does it leave when it is told to?

A checkpoint is taken where everything fits together: when the loop comes back to its loader for the next batch after an update
(all it did with the last one is done, schedulers and logging included), or at the end of an epoch.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from allranks.ckpt import Retention, Snapshot
from allranks.comm import values
from allranks.core.errors import CheckpointError, CommError, UsageError
from allranks.data import RankLoader
from allranks.record.values import Phase
from allranks.train import sending, snapshot
from allranks.train.deciding import Deciding
from allranks.train.evaluation import Evaluating
from allranks.train.pausing import Decision, Pause
from allranks.train.resuming import Resuming
from allranks.train.signals import StopSignals
from allranks.train.slots import Update
from allranks.train.until_update import UntilUpdate

logger = logging.getLogger(__name__)

DEFAULT_MINUTES = 10.0
_ALL_CALL_WITHIN_S = 60.0
_EARLY_WAIT_S = 20.0
_SHARED_WITH_WEIGHTS = ("optimizers", "emas", "exchanges", "local")


class Left(SystemExit):
    """The run was asked to stop, has saved, and ends the script with code 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class Saving(Evaluating, Deciding, Resuming):
    """The part of a run that saves and leaves."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._every: dict[str, float | None] = {"steps": None, "minutes": DEFAULT_MINUTES, "epochs": None}
        self._saves_at_the_end = False
        self._wanted: dict[str, Any] | None = None  # a run.save() that waits for the next place to save at
        self._save_calls = 0
        self._is_in_epoch = False
        self._updates_seen = 0
        self._has_prepared = False
        self._until_update = UntilUpdate(self._record)
        self._tail: Snapshot | None = None  # the state when the training loader came to its end
        self._saved_at: tuple[int, int] | None = None  # updates and epoch of the last save
        stop_file = os.environ.get("ALLRANKS_STOP_FILE")
        self._pause = Pause(
            rank=self.rank,
            world_size=self.world_size,
            store=self._membership.store,
            synchronize=self._wait_for_device,
            stop_file=Path(stop_file) if stop_file else None,
        )
        self._signals = StopSignals(self._pause.ask_to_stop, f"rank {self.rank} on {self.place.host}")
        self._signals.install()
        self.on_update.append(self._updated)

    def save_every(
        self,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        epochs: int | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        best: str | None = None,
        best_is: Any = None,
        target: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Say when to save, and what stays. Before the first epoch, the same on every rank. Not collective.

        With it a run also saves at its end. Without it a run saves every 10 minutes, and keeps three.

        Args:
            steps: Save each time the number of updates is a multiple of it.
            minutes: Save when so much time has passed since the last save.
            epochs: Save at the end of each such epoch.
            keep: How many of the newest stay; None keeps all.
            keep_every: Checkpoints whose step is a multiple of it stay for good.
            best: A value of run.log or run.save(metrics=...): the checkpoint with the best one stays too.
            best_is: "highest" or "lowest".
            target: Folder or fsspec URL (s3://bucket/run) instead of RUN/checkpoints; all ranks must see the same.
            options: For fsspec.

        Raises:
            UsageError: AR611 a number that cannot be, AR623 the training has begun already.
        """
        self._require_open("save_every")
        if self._has_begun:
            raise UsageError(
                "AR623", "run.save_every after the training has begun", fix="call it before run.epochs"
            )
        self._retention = Retention(keep=keep, keep_every=keep_every, best=best, best_is=best_is)
        for name, value in (("steps", steps), ("minutes", minutes), ("epochs", epochs)):
            is_number = isinstance(value, (int, float) if name == "minutes" else int) and not isinstance(
                value, bool
            )
            if value is not None and not (is_number and value > 0):
                raise UsageError(
                    "AR611", f"{name}={value!r}", fix=f"{name} above 0, or None for no such rule"
                )
        self._every = {"steps": steps, "minutes": minutes, "epochs": epochs}
        self._saves_at_the_end = True
        if target is not None:
            self._target, self._target_options = target, options

    def save(self, *, blocking: bool = False, metrics: Mapping[str, float] | None = None) -> None:
        """Save at the next place where everything fits together: the end of this iteration, or of this epoch. **Collective**.

        Outside an epoch it saves at once. The loop is held while the weights are copied; a background thread copies what
        stays until the next update, and writes it all.

        Args:
            blocking: Hold the loop until it is on the disk.
            metrics: For save_every(best=...).

        Raises:
            CheckpointError: AR621 not every rank calls it, AR606 a value cannot be saved, AR608 a save failed.
        """
        self._require_open("save")
        self._wanted = {"blocking": blocking, "metrics": dict(metrics or {})}
        if not self._is_in_epoch and self._training_loader is None:
            self._save_wanted()

    # -- places to save at -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        super()._begin()
        self._updates_seen = self.updates
        if self._found is not None:
            self._saved_at = (self.updates, self.epoch)
        minutes = self._every["minutes"]
        self._pause.ask_to_save_every(None if minutes is None else minutes * 60)
        self._pause.start()

    def _updated(self, update: Update) -> None:
        # With a loader of ours the place is where the loop comes back to it; a hand-made loop has no other place than this.
        if self._training_loader is None:
            self._between_iterations()

    def _after_iteration(self) -> None:
        """The loop comes back to a training loader: all it did with the last batch is done."""
        batch = self._stepper.micro_batch
        if batch is None or batch.is_last:
            self._between_iterations()

    def _on_end(self, loader: RankLoader) -> None:
        super()._on_end(loader)
        if (
            loader.is_training
            and not any(m.is_apart for m in self.models.values())  # who is apart must meet to save
            and self._updates_seen == self.updates
            and self._is_in_epoch
            and self._has_begun
        ):
            state = snapshot.take(self, self._tracked, self._tracked_per_rank, {})
            # What an update changes stays as it is until the next one; what the code after the loop changes (schedulers, the user's
            # own objects, random states) is copied.
            self._tail = replace(state, training=_copied(state.training), this_rank=_copied(state.this_rank))

    def _during_evaluation(self) -> None:
        """Told to leave while evaluating, which may outlast the time that is left: save what there was when the loop ended.

        The ranks are after the same update, so no agreement is needed; they leave, as ever, at the end of the epoch.
        """
        if self._tail is None or not self._pause.is_stop_asked():
            return
        tail, self._tail = self._tail, None
        if self._checkpoints is not None and self._saved_at != (self.updates, self.epoch):
            self._checkpoints.save_early(tail, wait_for_ranks_s=_EARLY_WAIT_S)

    def _between_iterations(self) -> None:
        self._tail = None
        updates = self.updates
        if updates == self._updates_seen:
            return
        self._updates_seen = updates
        self._until_update.end()
        if not self._has_begun:
            self._refuse_beside_checkpoints()
            self._begin()
        if not self._has_prepared:
            self._prepare()
        if self._checkpoints is not None:
            self._checkpoints.check()
        decision = self._pause.after_update()
        if decision is not None:
            self._follow(decision)
        steps = self._every["steps"]
        if self._wanted is not None:
            self._save_wanted(is_between=True)
        elif steps is not None and updates % steps == 0 and self._saved_at != (updates, self.epoch):
            self._save_now(is_between=True)

    def _follow(self, decision: Decision) -> None:
        if decision.stop is not None:
            self._leave(decision.stop)
        elif decision.save:
            self._save_now(is_between=True)

    def _leave_if_told(self) -> None:
        """At the end of an epoch, after all ranks agreed to stop: was it a request from outside? Collective."""
        reasons = [r for r in values.gather_objects(self._pause.stop_reason) if r is not None]
        if reasons:
            self._leave(reasons[0])

    def _leave(self, reason: str) -> None:
        """Save, and end the script with code 0. All ranks do, after the same update."""
        if self._saved_at != (self.updates, self.epoch):
            self._save_now(blocking=True)
        checkpoints = self._open_checkpoints()
        checkpoints.wait()
        if self.is_rank_zero:
            logger.info(
                "stopped after update %d: %s; saved in %s; the same command goes on from there",
                self.updates,
                reason,
                checkpoints.store.target,
            )
        self._event("stop", step=self.updates, epoch=self.epoch, reason=reason)
        raise Left(reason)

    def _end_epoch(self) -> None:
        """An epoch is complete: schedulers stepped, the epoch counted. Collective if it saves."""
        self._tail = None
        epochs = self._every["epochs"]
        if self._wanted is not None:
            self._save_wanted()
        elif epochs is not None and self.epoch % epochs == 0:
            self._save_now()

    def _end_training(self) -> None:
        """The last epoch is over. Collective if it saves, and where ranks train apart."""
        self.synchronize()
        if self._saves_at_the_end and self._saved_at != (self.updates, self.epoch):
            self._save_now()

    # -- saving ------------------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """After the first update the optimizers have their state: make the buffers of the first save while the loop goes on."""
        self._has_prepared = True
        if self._saves_at_the_end and self._checkpoints is not None and not self._checkpoints.is_busy:
            self._checkpoints.prepare(snapshot.take(self, self._tracked, self._tracked_per_rank, {}))

    def _save_wanted(self, *, is_between: bool = False) -> None:
        wanted, self._wanted = self._wanted or {}, None
        self._require_all_save()
        self._save_now(**wanted, is_between=is_between)

    def _save_now(
        self,
        *,
        blocking: bool = False,
        metrics: Mapping[str, float] | None = None,
        is_between: bool = False,
    ) -> None:
        """Save. With `is_between` the loop goes on to its next batch, so that optimizers' state may be copied during it."""
        values_ = {k: v for k, v in self._logged.items() if isinstance(v, (int, float))} | dict(metrics or {})
        self._record.phase(Phase.CHECKPOINT)
        try:
            checkpoints = self._open_checkpoints()
            self.settle()
            with sending.averaged(self.models):
                state = snapshot.take(self, self._tracked, self._tracked_per_rank, values_)
                # What is copied later is of rank 0 alone: the other ranks' files have no part of what all share.
                may_stay = is_between and not blocking
                stays = self._until_update.begin(checkpoints, self.slots.values()) if may_stay else ()
                checkpoints.save(state, blocking=blocking, stays=stays)
        finally:
            self._record.leave()
        self._saved_at = (self.updates, self.epoch)
        self._pause.has_saved()

    def _require_all_save(self) -> None:
        """Meet the other ranks without a collective: one that does not save would meet this one with something else."""
        self._save_calls += 1
        try:
            self.barrier(f"run.save number {self._save_calls}", timeout_s=_ALL_CALL_WITHIN_S)
        except CommError as error:
            raise CheckpointError(
                "AR621",
                f"run.save on rank {self.rank} after update {self.updates}: {error.what.removeprefix('run.save ')}",
                why="likely run.save stands under `if run.is_rank_zero:`; every rank has state of its own to save",
                fix="call run.save on every rank; rank 0 alone writes what they share",
            ) from error

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- the end -----------------------------------------------------------------------------------------------------------------

    def close(self, *, failing: bool = False) -> None:
        """End the run: what is being saved is finished.

        Raises:
            CheckpointError: AR608 the last save failed; not if `failing`.
        """
        try:
            if self._is_open and not failing:
                if self._wanted is not None:
                    self._save_wanted()
                self.synchronize()
        finally:
            self._signals.close()
            self._pause.close()
            super().close()
            if self._checkpoints is not None:
                self._checkpoints.close(failing=failing)


def _copied(part: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v if k in _SHARED_WITH_WEIGHTS else copy.deepcopy(v) for k, v in part.items()}
