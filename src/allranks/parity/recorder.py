"""What has this rank done since the last update? Collected from the calls that listening.py hears, written after every update."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from allranks.parity.contents import look_at
from allranks.parity.options import RecordOptions
from allranks.parity.writer import Writer
from allranks.wrap import plain


class LoaderPass:
    """One pass over one loader. It trains if a backward came while it went on."""

    def __init__(self, loader: int) -> None:
        self.loader = loader
        self.trains = False
        self.drawn: list[list[Any]] = []  # rows of Batch, not yet part of an update
        self.since_backward = 0  # samples


class Recorder:
    """Everything between two updates of one rank. Nothing is recorded once there are enough updates."""

    def __init__(self, writer: Writer, options: RecordOptions) -> None:
        self.writer, self.options = writer, options
        self.pid = os.getpid()
        self.updates = 0
        self.num_loaders = 0
        self.models: list[tuple[str, nn.Module]] = []
        self.uses_library = False
        self.in_library = 0  # > 0 inside a step of the library, which tells its losses itself
        self.depth = 0  # of nested forwards
        self.is_stand_in = False  # the micro-batch counts for nothing
        self._passes: list[LoaderPass] = []
        self._losses: list[list[Any]] = []
        self._layers: dict[str, list[Any]] = {}
        self._dropouts: dict[str, int] = {}
        self._autocast = ""
        self._gradients: list[list[Any]] = []
        self._optimizers: list[int] = []
        self._layer_names: dict[int, str] = {}
        self._inside: list[str] = []
        self._is_done = False

    @property
    def is_on(self) -> bool:
        """Whether to listen: in the rank itself, not in its loader workers, until there are enough updates."""
        return not self._is_done and os.getpid() == self.pid

    # -- data ----------------------------------------------------------------------------------------------------------------

    def begin_pass(self, loader: int) -> LoaderPass:
        """A loop over a loader begins."""
        one = LoaderPass(loader)
        self._passes.append(one)
        return one

    def drew(self, one: LoaderPass, batch: Any, indices: list[Any] | None, is_stand_in: bool = False) -> None:
        """A batch was handed out."""
        count, hashes, shape = look_at(batch)
        self.is_stand_in = is_stand_in
        if is_stand_in:
            return
        count = len(indices) if indices is not None else count
        one.drawn.append([one.loader, count, indices, hashes, shape])
        one.since_backward += count if torch.is_grad_enabled() else 0

    def end_pass(self, one: LoaderPass) -> None:
        """The loop has come to its end, or was left."""
        if one not in self._passes:
            return
        if not one.trains:
            self._passes.remove(one)
            ids = [
                i for row in one.drawn for i in (row[2] if row[2] is not None else row[3] or ["?"] * row[1])
            ]
            self.writer.line("pass", loader=one.loader, ids=ids, after=self.updates)

    # -- forward and backward ------------------------------------------------------------------------------------------------

    def adopt(self, module: nn.Module) -> None:
        """The outermost module of a forward: a model, if it has parameters."""
        module = plain(module)
        if any(module is known for _, known in self.models) or next(module.parameters(), None) is None:
            return
        prefix = "" if not self.models else f"model{len(self.models) + 1}."
        self.models.append((prefix, module))
        for name, part in module.named_modules():
            self._layer_names.setdefault(id(part), prefix + (name or type(part).__name__))
            if not self.options.dropout and isinstance(part, nn.RNNBase):
                part.dropout = 0.0
        rows = [self.writer.print_of(prefix + name, p) for name, p in module.named_parameters()]
        self.writer.line("model", weights=rows)

    def enter(self, module: nn.Module) -> None:
        """A module's forward begins."""
        if self.depth == 0:
            self.adopt(module)
        self.depth += 1
        self._inside.append(self._layer_names.get(id(module), ""))

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module's forward has ended; a layer without parts has its output added up."""
        self.depth = max(0, self.depth - 1)
        name = self._inside.pop() if self._inside else ""
        if (
            not name
            or not torch.is_grad_enabled()
            or self.is_stand_in
            or next(module.children(), None) is not None
        ):
            return
        output = next((o for o in (output if isinstance(output, (tuple, list)) else [output])), None)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        wide = output.detach().double()
        row = self._layers.setdefault(name, [name, type(module).__name__, 0, 0.0, 0.0, 0.0])
        row[2] += output.numel()
        row[3] += float(wide.sum())
        row[4] += float(wide.square().sum())
        row[5] += float(wide.abs().sum())
        if not self._autocast and torch.is_autocast_enabled(output.device.type):
            self._autocast = str(torch.get_autocast_dtype(output.device.type)).removeprefix("torch.")

    def dropped(self) -> None:
        """Something was dropped at random."""
        name = next((name for name in reversed(self._inside) if name), "outside the model")
        self._dropouts[name] = self._dropouts.get(name, 0) + 1

    def backward(self, value: float | None, weight: float | None = None) -> None:
        """A loss goes into backward; `weight` if it is a sum over it."""
        drawn = 0
        for one in self._passes:
            if one.since_backward:
                one.trains = True
                drawn = max(drawn, one.since_backward)
                one.since_backward = 0
        if value is None or (self.is_stand_in and weight is None):
            self._losses.append([0.0, 0.0, False])
        elif weight is not None:
            self._losses.append([value, weight, True])
        else:
            self._losses.append([value, drawn or 1, False])

    @contextlib.contextmanager
    def library_step(self, loss: Any, weight: float | None) -> Iterator[None]:
        """A step of the library: the loss as the user gave it, not as it is scaled for the ranks."""
        self.uses_library = True
        self.backward(float(loss.detach()) if isinstance(loss, torch.Tensor) else None, weight)
        self.in_library += 1
        try:
            yield
        finally:
            self.in_library -= 1

    # -- the update ----------------------------------------------------------------------------------------------------------

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are final."""
        names = self._names(optimizer)
        self._gradients = [self.writer.print_of(name, p.grad) for name, p in names if p.grad is not None]

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Write down the update; leave the script if it was the last."""
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        self.updates += 1
        self.writer.line(
            "step",
            number=self.updates,
            optimizer=self._optimizers.index(id(optimizer)),
            rates=[float(group["lr"]) for group in optimizer.param_groups],
            batches=[row for one in self._passes if one.trains for row in one.drawn],
            losses=self._losses,
            layers=list(self._layers.values()),
            dropouts=self._dropouts,
            autocast=self._autocast,
            uses_library=self.uses_library,
            gradients=self._gradients,
            weights=[self.writer.print_of(name, p) for name, p in self._names(optimizer)],
            buffers=[
                self.writer.print_of(prefix + name, buffer)
                for prefix, model in self.models
                for name, buffer in model.named_buffers()
            ],
        )
        self._losses, self._layers, self._dropouts, self._gradients = [], {}, {}, []
        for one in self._passes:
            if one.trains:
                one.drawn = []
        if self.updates >= self.options.updates:
            self.close("updates")
            raise SystemExit(0)

    def close(self, reason: str) -> None:
        """No more is recorded."""
        if self.is_on:
            self._is_done = True
            self.writer.close(reason)

    def _names(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        """The optimizer's parameters by the names they have in their model."""
        known = {
            id(p): prefix + name for prefix, model in self.models for name, p in model.named_parameters()
        }
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return [(known.get(id(p), f"parameter {i} of no model"), p) for i, p in enumerate(parameters)]
