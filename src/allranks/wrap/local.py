"""How do ranks train on their own for a while and come together again? Local steps, then one mean of the weights.

    every `every` updates     the mean of all ranks' weights, on every rank (post-local SGD: Lin et al. 2018, arXiv:1808.07217)
    with "nesterov"           the difference to the weights of the last time is the gradient of an outer SGD with Nesterov
                              momentum (DiLoCo: Douillard et al. 2023, arXiv:2311.08105)

Optimizers' own states (momentum, Adam's moments) stay each rank's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from allranks.wrap.settings import LocalSettings


def _world_mean(tensors: list[torch.Tensor]) -> None:
    import torch.distributed as dist

    for tensor in tensors:
        dist.all_reduce(tensor.div_(dist.get_world_size()))


class LocalSteps:
    """The synchronisations of one model's weights.

    Args:
        named: The parameters that are trained, in the model's order; equal on all ranks now.
        settings: How often, and how.
        mean: Averages 1-d tensors over all ranks in place; the group's all-reduce if not given.
    """

    def __init__(
        self, named: list[tuple[str, torch.nn.Parameter]], settings: LocalSettings, mean: Any = None
    ) -> None:
        self.settings, self._mean = settings, mean or _world_mean
        self._names, self._parameters = [n for n, _ in named], [p for _, p in named]
        self.updates = 0  # since the last synchronisation
        self._own: dict[str, torch.Tensor] | None = None  # while the mean is in their place
        self._anchors: list[torch.Tensor] = []  # the weights of the last synchronisation, stepped by `_outer`
        self._outer: torch.optim.SGD | None = None
        if settings.outer_optimizer is not None:
            self._anchors = [p.detach().clone() for p in self._parameters]
            self._outer = torch.optim.SGD(
                self._anchors,
                lr=settings.outer_lr,
                momentum=settings.outer_momentum,
                nesterov=settings.outer_momentum > 0,
            )

    @property
    def is_apart(self) -> bool:
        """Whether ranks may hold different weights now."""
        return self.updates > 0

    def after_update(self) -> bool:
        """An update was made; whether the ranks came together after it. **Collective** then."""
        self.updates += 1
        if self.updates < self.settings.every:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Make all ranks' weights equal, if they are not. **Collective**."""
        if not self.is_apart:
            return
        self.updates = 0
        means = self._means()
        with torch.no_grad():
            if self._outer is not None:
                for anchor, mean in zip(self._anchors, means, strict=True):
                    anchor.grad = anchor - mean
                self._outer.step()
                self._outer.zero_grad(set_to_none=True)
                means = self._anchors
            for parameter, value in zip(self._parameters, means, strict=True):
                parameter.copy_(value)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean of all ranks' weights in their place, for the block; afterwards each rank has its own again. **Collective**."""
        if not self.is_apart or self._own is not None:
            yield
            return
        own = self._own = self.own_weights()
        with torch.no_grad():
            for parameter, mean in zip(self._parameters, self._means(), strict=True):
                parameter.copy_(mean)
        try:
            yield
        finally:
            self._own = None
            self.put_weights(own)

    def _means(self) -> list[torch.Tensor]:
        """By parameter, the mean over the ranks, in one exchange for each dtype."""
        flats: dict[torch.dtype, torch.Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in self._parameters):
            flats[dtype] = torch.cat([p.detach().reshape(-1) for p in self._parameters if p.dtype == dtype])
        self._mean(list(flats.values()))
        taken = dict.fromkeys(flats, 0)
        means: list[torch.Tensor] = []
        for p in self._parameters:
            begin = taken[p.dtype]
            taken[p.dtype] = begin + p.numel()
            means.append(flats[p.dtype][begin : begin + p.numel()].view_as(p))
        return means

    def own_weights(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's weights, by name."""
        if self._own is not None:
            return self._own
        return {n: p.detach().clone() for n, p in zip(self._names, self._parameters, strict=True)}

    def put_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """What own_weights gave."""
        with torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.copy_(weights[name])

    def state_dict(self) -> dict[str, Any]:
        """What all ranks share: references, not copies. A rank's weights come beside it where ranks are apart."""
        momenta = [self._outer.state[a].get("momentum_buffer") for a in self._anchors] if self._outer else []
        return {
            "updates": self.updates,
            "anchors": dict(zip(self._names, self._anchors, strict=False)),
            "momenta": {n: m for n, m in zip(self._names, momenta, strict=False) if m is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any], own: Mapping[str, torch.Tensor] | None) -> None:
        """Go on from state_dict; after the model has its weights.

        Args:
            state: What all ranks share.
            own: This rank's weights, where ranks were apart; None if it has none (other ranks saved): it begins with the mean.
        """
        self.updates = state["updates"] if own is not None else 0
        if own is not None:
            self.put_weights(own)
        if self._outer is None:
            return
        with torch.no_grad():
            for name, anchor, parameter in zip(self._names, self._anchors, self._parameters, strict=True):
                anchor.copy_(state["anchors"].get(name, parameter))
                if name in state["momenta"]:
                    self._outer.state[anchor]["momentum_buffer"] = (
                        state["momenta"][name].to(anchor.device, anchor.dtype).clone()
                    )
