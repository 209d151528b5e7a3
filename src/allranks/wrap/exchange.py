"""How do a model's gradients come from its ranks to all of them? Through memory, over the network, or both, in the form asked for.

    one host                     memory (wrap/memory.py); nothing is compressed, as nothing is slow
    one rank on each host        DDP's own all-reduce; with compress=, a hook that sends the gradients in another form
    several ranks on each host   memory, then one rank of each host over the network, then memory again (comm/hosts.py)

"none", "bf16" and "fp16" between single ranks are torch's own hooks, bucket by bucket while the backward goes on. All else happens
once, after the last bucket: gradients are laid out in the order of the model's parameters, so that what a method keeps from update to
update does not depend on DDP's buckets, and no two exchanges can pass each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from allranks.comm.hosts import Apart, Hosts, open_hosts
from allranks.comm.memory import why_not_here
from allranks.comm.memory.summing import ALIGN
from allranks.core.errors import UsageError
from allranks.record import compat
from allranks.wrap.choosing import Chooser
from allranks.wrap.memory import share_memory
from allranks.wrap.reducer import gives_sparse_gradients, hook_into
from allranks.wrap.settings import CompressSettings
from allranks.wrap.wire import HALF, Layout, Method, make_method

logger = logging.getLogger(__name__)


class Exchange:
    """The hook of one replica.

    Args:
        replica: DDP's.
        named: The parameters that are trained, in the model's order.
        hosts: Where ranks share hosts; None if each goes over the network for itself.
        settings: What was asked for.
        scale_of: The loss scaler's scale; None without one.
    """

    def __init__(
        self,
        replica: DistributedDataParallel,
        named: list[tuple[str, torch.nn.Parameter]],
        hosts: Hosts | None,
        settings: CompressSettings,
        scale_of: Callable[[], float] | None,
    ) -> None:
        world: Any = dist.group.WORLD
        self.hosts, self.group = hosts, hosts.group if hosts is not None else world
        self.settings, self._scale_of = settings, scale_of
        self.issued = [
            0
        ]  # by ranks that leave the network to their leader: what the group would have counted
        self.device = named[0][1].device
        self._places = {id(p): i for i, (_, p) in enumerate(named)}
        self._kinds: dict[torch.dtype, Layout] = {}
        for name, p in named:
            self._kinds.setdefault(p.dtype, []).append((name, p.shape))
        self._methods: dict[torch.dtype, Method] = {}
        self._flats: dict[torch.dtype, torch.Tensor] = {}
        self._owed: dict[torch.dtype, torch.Tensor] = {}  # held back by a method that is used no more
        self._waiting: list[tuple[Future[torch.Tensor], Any]] = []
        self._scale = 1.0
        self.chooser = Chooser(self, settings.allowed()) if settings.method == "auto" else None
        self.use("none" if self.chooser is not None else settings.method)
        hook_into(replica, self.take)

    @property
    def is_by_bucket(self) -> bool:
        """Whether each of DDP's buckets is sent for itself, while the backward goes on, in every way that may be chosen."""
        names = self.chooser.allowed if self.chooser is not None else (self.name,)
        return self.hosts is None and all(name == "none" or name in HALF for name in names)

    @property
    def is_leader(self) -> bool:
        """Whether this rank uses the network."""
        return self.hosts is None or self.hosts.is_leader

    def make(self, name: str) -> dict[torch.dtype, Method]:
        """The method of that name for each dtype; this rank must be a leader."""
        return {
            dtype: make_method(name, self.group, layout, self.settings.rank)
            for dtype, layout in self._kinds.items()
        }

    def use(self, name: str) -> None:
        """Send by this method from the next update on; the same on every rank. What the one before held back is sent first."""
        for dtype, method in self._methods.items():
            error = method.take_error()
            if error is not None:
                self._owed[dtype] = self._owed[dtype].add_(error) if dtype in self._owed else error
        self.name = name
        self._methods = self.make(name) if self.is_leader else {}
        half = name in HALF
        self._streams = self.hosts is None and (half or name == "none")

    def take(self, bucket: Any) -> Future[torch.Tensor]:
        """DDP's hook: begin to average a bucket. **Collective**: the same buckets in the same order on all ranks.

        Raises:
            CommError: AR050 a rank of this host is gone, AR051 the time is over.
        """
        if self.chooser is not None and bucket.index() == 0:
            self.chooser.begin()
        if self._streams and not self._owed:
            hooks = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}
            return hooks.get(self.name, default_hooks.allreduce_hook)(self.group, bucket)
        if self.hosts is not None:
            self.issued[0] += 1
        devices: Any = [self.device] if self.device.type == "cuda" else None
        future: Future[torch.Tensor] = Future(devices=devices)
        self._waiting.append((future, bucket))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            self._average([b for _, b in waiting])
            for ready, b in waiting:
                ready.set_result(b.buffer())
        return future

    def mean(self, tensors: list[torch.Tensor]) -> None:
        """The mean over all ranks of 1-d tensors, in place, with nothing lost; the same bits everywhere. **Collective**."""
        if self.hosts is None:
            for tensor in tensors:
                dist.all_reduce(tensor.div_(dist.get_world_size()))
            return
        self.hosts.add_up(tensors)
        if self.is_leader:
            for tensor in tensors:
                dist.all_reduce(tensor.div_(dist.get_world_size()), group=self.group)
        self.hosts.spread(tensors)

    def _average(self, buckets: list[Any]) -> None:
        buffers = [b.buffer() for b in buckets]
        hosts = self.hosts
        if hosts is not None:
            hosts.add_up(buffers)
        if self.is_leader:
            self._over_the_network(buckets)
        if hosts is not None:
            hosts.spread(buffers)

    def _over_the_network(self, buckets: list[Any]) -> None:
        self._follow_scale()
        parts = [
            (parameter, gradient)
            for bucket in buckets
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        parts.sort(key=lambda part: self._places[id(part[0])])
        for dtype, method in self._methods.items():
            gradients = [gradient for _, gradient in parts if gradient.dtype == dtype]
            flat = self._flat(dtype, gradients)
            if (
                self.hosts is not None
            ):  # the mean over hosts of their sums, which are not over as many ranks each
                flat.mul_(len(self.hosts.leaders) / dist.get_world_size())
            owed = self._owed.pop(dtype, None)
            method.average(flat if owed is None else flat.add_(owed))
            for gradient, piece in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def _flat(self, dtype: torch.dtype, gradients: list[torch.Tensor]) -> torch.Tensor:
        flat = self._flats.get(dtype)
        if flat is None:
            total, device = sum(g.numel() for g in gradients), gradients[0].device
            flat = self._flats[dtype] = torch.empty(total, dtype=dtype, device=device)
        return torch.cat([g.reshape(-1) for g in gradients], out=flat)

    def _follow_scale(self) -> None:
        """What was held back of scaled gradients is scaled like the ones it is added to."""
        if self._scale_of is None or (not self._owed and all(m.is_exact for m in self._methods.values())):
            return
        scale = self._scale_of()
        for method in self._methods.values():
            method.rescale(scale / self._scale)
        for owed in self._owed.values():
            owed.mul_(scale / self._scale)
        self._scale = scale

    def state_dict(self) -> dict[str, Any]:
        """What this rank must have to go on as if it had not stopped; references, not copies."""
        return {
            "method": self.name,
            "scale": self._scale,
            "kept": {str(dtype): method.state_dict() for dtype, method in self._methods.items()},
            "chosen": self.chooser.state_dict() if self.chooser is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What state_dict gave; of another method, only what applies."""
        if self.chooser is not None and state.get("chosen") is not None:
            self.chooser.load_state_dict(state["chosen"])
        if state["method"] != self.name:
            return
        self._scale = state["scale"]
        for dtype, method in self._methods.items():
            method.load_state_dict(state["kept"].get(str(dtype), {}))


def connect(
    replica: DistributedDataParallel,
    named: list[tuple[str, torch.nn.Parameter]],
    device: torch.device,
    name: str,
    *,
    shared_memory: Any,
    settings: CompressSettings,
    scale_of: Callable[[], float] | None = None,
) -> tuple[Exchange | None, bool]:
    """Decide how `replica` averages its gradients, and have it do so. **Collective**, the same on all ranks.

    Returns:
        The exchange, None where DDP's own all-reduce or memory alone does it; and whether it is memory alone.

    Raises:
        CommError: AR052 shared_memory=True, and the ranks have none in common.
        UsageError: AR117 gradients that cannot be compressed.
    """
    if shared_memory is not False and share_memory(replica, device, name, is_required=shared_memory is True):
        if settings.method not in ("none", "auto") and dist.get_rank() == 0:
            logger.warning(
                "%s: compress=%r has nothing to do: all ranks are on one host and exchange through memory; "
                "shared_memory=False sends all the same",
                name,
                settings.method,
            )
        return None, True
    is_sparse = gives_sparse_gradients(replica.module)
    if settings.method != "none" and is_sparse:
        raise UsageError(
            "AR117",
            f"{name}: compress={settings.method!r}, but an embedding gives sparse gradients",
            fix="sparse=False, or compress='none'",
        )
    hosts = _find_hosts(named, device, name, is_sparse) if shared_memory is not False else None
    if hosts is None and settings.method == "none":
        return None, False
    exchange = Exchange(replica, named, hosts, settings, scale_of)
    if hosts is not None:
        # The watcher compares how many collectives ranks have issued in a group, DDP's included.
        compat.beside.setdefault(dist.group.WORLD, []).append(exchange.issued)
    return exchange, False


def _find_hosts(
    named: list[tuple[str, torch.nn.Parameter]], device: torch.device, name: str, is_sparse: bool
) -> Hosts | None:
    if device.type != "cpu":
        return None  # the same on every rank
    parameters = [p for _, p in named]
    reason = why_not_here(parameters, device) or ("an embedding gives sparse gradients" if is_sparse else "")
    room = sum(-(-p.numel() * p.element_size() // ALIGN) * ALIGN for p in parameters) + ALIGN
    hosts = open_hosts(room, reason)
    if isinstance(hosts, Apart):
        logger.debug("%s: every rank goes over the network for itself: %s", name, hosts.reason)
        return None
    if dist.get_rank() == 0:
        logger.info("%s: %d hosts; on each, one rank uses the network", name, len(hosts.leaders))
    return hosts
