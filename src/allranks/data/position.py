"""Where does a loader go on after a restart: which epoch, which global batch, which micro-batch?

The position counts global batches, so it means the same on another number of ranks. Only the place inside a window
(`micro`) belongs to one layout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allranks.core.errors import CheckpointError

logger = logging.getLogger(__name__)

VERSION = 1


@dataclass(frozen=True, slots=True)
class Position:
    """The micro-batch that comes next.

    Attributes:
        epoch: Epoch of the sequence.
        pass_: Pass within the epoch, for loops that go through the loader more than once in an epoch.
        batch, micro: Global batch in the epoch and micro-batch in its window.
    """

    epoch: int = 0
    pass_: int = 0
    batch: int = 0
    micro: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What the sequence of a loader follows from; saved with a position and compared when it is loaded.

    Attributes:
        seed: Seed of the orders.
        global_batch_size: Samples of an update; None with a batch sampler.
        num_samples: Length of the data set; None where it has none.
        num_micro: Micro-batches of a full window.
        world_size: Ranks; a different one is no fault.
    """

    seed: int
    global_batch_size: int | None
    num_samples: int | None
    num_micro: int | None
    world_size: int

    def to_state(self, position: Position) -> dict[str, Any]:
        """Plain values only, so that loading it never executes code."""
        return {
            "version": VERSION,
            "epoch": position.epoch,
            "pass": position.pass_,
            "batch": position.batch,
            "micro": position.micro,
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "num_samples": self.num_samples,
            "num_micro": self.num_micro,
            "world_size": self.world_size,
        }

    def from_state(self, state: Mapping[str, Any]) -> Position:
        """The place in *this* layout that a saved state means.

        Raises:
            CheckpointError: AR141 the state belongs to another data set or another batch size.
        """
        if state.get("version") != VERSION:
            raise CheckpointError(
                "AR141",
                f"the loader state has version {state.get('version')!r}, this allranks reads {VERSION}",
                fix="the allranks it was written with, or a new run",
            )
        if state["num_samples"] != self.num_samples:
            raise CheckpointError(
                "AR141",
                f"the loader state was written with {state['num_samples']} samples, the data set has {self.num_samples}",
                why="its order is another one: samples would come twice or never",
                fix="the same data set, or begin at an epoch's start by not loading this state",
            )
        batch = self._batch_from(state)
        micro = state["micro"]
        same_windows = (state["world_size"], state["num_micro"]) == (self.world_size, self.num_micro)
        if micro and not (same_windows and state["global_batch_size"] == self.global_batch_size):
            logger.warning(
                "the loader goes on at the start of global batch %d, not at its micro-batch %d: "
                "it was saved on %d ranks, which divide a batch differently than %d",
                batch,
                micro,
                state["world_size"],
                self.world_size,
            )
            micro = 0
        return Position(state["epoch"], state["pass"], batch, micro)

    def _batch_from(self, state: Mapping[str, Any]) -> int:
        theirs, ours, batch = state["global_batch_size"], self.global_batch_size, state["batch"]
        if theirs == ours:
            return batch
        if theirs is None or ours is None or (batch * theirs) % ours:
            raise CheckpointError(
                "AR141",
                f"the loader state was written with global_batch_size={theirs} after {batch} batches, now it is {ours}",
                why="no batch of the new size begins where the old ones ended"
                if theirs and ours
                else "one of them is a batch sampler's",
                fix=f"global_batch_size={theirs}",
            )
        logger.warning(
            "global_batch_size was %d and is %d: the loader goes on at the same sample", theirs, ours
        )
        return batch * theirs // ours
