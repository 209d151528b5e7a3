"""How is a model evaluated on all ranks so that the numbers are those of one device? Each sample once, nobody waits for the slowest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from allranks.comm import gradients, values
from allranks.core.errors import UsageError
from allranks.data import RankLoader
from allranks.record.values import Phase
from allranks.train import sending
from allranks.train.state import RunState
from allranks.wrap import Ema, plain


class Evaluating(RunState):
    """The part of a run that evaluates and brings values together."""

    @contextlib.contextmanager
    def evaluate(self, *models: nn.Module, ema: Ema | None = None) -> Iterator[None]:
        """Evaluation mode, no gradients, no communication in forwards, for the block; afterwards everything as it was.

        Entering is **collective** (running statistics become rank 0's, and where ranks train apart the mean of their weights takes
        their place); inside, ranks may do different numbers of batches.

        Args:
            models: Those to switch; all of the run's if none is given.
            ema: Evaluate with these averaged weights in place of their model's.
        """
        self._require_open("evaluate")
        chosen = [plain(m) for m in models] or [plain(m) for m in self.models.values()]
        modes = [(part, part.training) for m in chosen for part in m.modules()]
        self.settle()
        self._window.local += 1
        self._record.phase(Phase.EVALUATE)
        try:
            with (
                torch.no_grad(),
                sending.averaged(self.models),
                ema.swapped() if ema is not None else contextlib.nullcontext(),
            ):
                for m in chosen:
                    m.eval()
                yield
        finally:
            self._record.leave()
            self._window.local -= 1
            for part, training in modes:
                part.training = training

    def settle(self) -> None:
        """Make the buffers of all models and averages rank 0's; done before evaluating and saving. Collective."""
        for model in self.models.values():
            model.buffers_sync.settle()
        for ema in self.emas.values():
            ema.settle()

    def synchronize(self) -> None:
        """Make the weights of all ranks equal now, where they train apart (sync_every); done at the end of a run. Collective."""
        for model in self.models.values():
            if model.local_steps is not None:
                model.local_steps.synchronize()

    def sum(self, values_: Any, /) -> Any:
        """The sum over all ranks of a number, a tensor, or an iterable of them; exact for whole numbers. Collective.

        Returns:
            A Python number for scalars, else a tensor. Ranks whose iterable is empty count 0.
        """
        self._require_open("sum")
        return values.total(values_)

    def mean(self, values_: Any, /, weight: Any = None) -> Any:
        """The mean over all ranks, weighted by `weight` (e.g. samples); a mapping is averaged entry by entry. Collective."""
        self._require_open("mean")
        return values.average(values_, weight)

    def gather(self, rows: Any, /, *, loader: RankLoader | None = None) -> Any:
        """All ranks' rows on every rank, in the data set's order. Collective, and so is the backward through it.

        A loss over gathered rows, the same on every rank, gets the gradient of one device: each rank's rows get theirs.

        Args:
            rows: This rank's outputs: a tensor (rows, ...), a list of such (one a batch), or a list of any objects.
            loader: The evaluation loader they came from; the one used last if not given. Rows are put in its data set's order if there
                is exactly one per sample; otherwise they stay in rank order, and it is an error if `loader` was given.

        Returns:
            A tensor (total rows, ...), or a list of objects.
        """
        self._require_open("gather")
        if isinstance(rows, (list, tuple)) and rows and all(isinstance(r, torch.Tensor) for r in rows):
            rows = torch.cat([r.reshape(1) if r.ndim == 0 else r for r in rows])
        is_tensor, sample = self._kind_of_rows(rows)
        if is_tensor:
            if not isinstance(rows, torch.Tensor):
                rows = sample.new_zeros((0, *sample.shape[1:]))
            training = self._stepper.micro_batch
            if self._last_evaluated is None and training is not None and training.num_samples == 0:
                rows = rows[:0]  # a stand-in's rows are another rank's
            parts = gradients.gather_rows(rows)
            num_rows = rows.shape[0] if rows.ndim else 1
        else:
            parts = values.gather_objects(list(rows))
            num_rows = len(rows)
        order = self._order_of(num_rows, loader)
        if is_tensor:
            every = torch.cat(parts)
            return every if order is None else every[torch.tensor(order, device=every.device)]
        flat = [row for part in parts for row in part]
        return flat if order is None else [flat[i] for i in order]

    def _kind_of_rows(self, rows: Any) -> tuple[bool, torch.Tensor]:
        """Whether the ranks hold tensors; a rank without a batch has an empty list and learns the shape from the others."""
        empty = not isinstance(rows, torch.Tensor) and len(rows) == 0
        mine = (
            None
            if empty
            else rows[:0].cpu()
            if isinstance(rows, torch.Tensor) and rows.ndim
            else rows
            if isinstance(rows, torch.Tensor)
            else "objects"
        )
        kinds = [k for k in values.gather_objects(mine) if k is not None]
        tensors = [k for k in kinds if isinstance(k, torch.Tensor)]
        if tensors and len(tensors) != len(kinds):
            raise UsageError(
                "AR161",
                "gather: some ranks give tensors and others give lists of objects",
                fix="the same kind on every rank",
            )
        return bool(tensors), tensors[0] if tensors else torch.empty(0)

    def _order_of(self, num_rows: int, loader: RankLoader | None) -> list[int] | None:
        """Where each data-set position's row lies among the gathered rows; None to leave them in rank order. Collective."""
        chosen = loader if loader is not None else self._last_evaluated
        # A rank may not have begun the pass, for lack of a batch: every rank takes part in the vote all the same.
        mine = [p for chunk in self._positions.get(id(chosen), []) for p in chunk]
        fits = values.every_rank(len(mine) == num_rows)
        if not fits:
            if loader is not None:
                raise UsageError(
                    "AR163",
                    f"gather: {num_rows} rows on rank {self.rank}, but its loader gave {len(mine)} samples in its last pass",
                    fix="one row for each sample of the last pass, or leave loader= out to keep rank order",
                )
            return None
        positions = [
            p for part in values.gather_rows(torch.tensor(mine, dtype=torch.int64)) for p in part.tolist()
        ]
        return sorted(range(len(positions)), key=positions.__getitem__)
