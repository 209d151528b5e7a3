"""What do we need of DDP that has no public name? Everything private of DDP is here, each with a fallback."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.comm.memory import MemorySum
from allranks.record import probe_training
from allranks.wrap import straight
from allranks.wrap.straight import Straight

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def replicate(
    module: nn.Module,
    device: torch.device,
    *,
    bucket_cap_mb: float | None,
    static_graph: bool,
    find_unused_parameters: bool,
) -> DistributedDataParallel:
    """Wrap for replication: same weights and buffers everywhere now, gradients averaged in every synchronised backward.

    Buffers are not broadcast in every forward (wrap/buffers.py does what is needed, and not inside a forward, where a rank that
    evaluates alone would wait for the others).
    """
    # torch >= 2.13 renames broadcast_buffers and warns; under the old name False also meant: never, not even at the start.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    options: dict[str, Any] = {
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False
    }
    if bucket_cap_mb is not None:
        options["bucket_cap_mb"] = bucket_cap_mb
    replica = _Replica(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        **options,
    )
    replica.see_whether_light(device)
    return replica


class _Replica(DistributedDataParallel):
    """DDP whose forward has nothing to do but to prepare its reducer, and then does only that.

    DDP asks in every forward about joining ranks, buffers, mixed precision, devices, compilers and profilers, which takes as long as a
    small model's forward. Here, on a CPU with DDP's usual options, the answers are known; in all other cases its own forward is called.
    """

    def see_whether_light(self, device: torch.device) -> None:
        """Once, after it was made."""
        own = vars(self)
        is_compiled = any(
            "_orig_mod" in m._modules or getattr(m, "_compiled_call_impl", None) is not None
            for m in self.module.modules()
        )
        is_usual = (
            device.type == "cpu"
            and not is_compiled
            and not own.get("find_unused_parameters", True)
            and not own.get("static_graph", True)
            and not own.get("_use_python_reducer", False)
            and not own.get("_delay_all_reduce_all_params", True)
            and own.get("mixed_precision", True) is None
            and hasattr(own.get("_join_config"), "enable")
            and own.get("_has_rebuilt_buckets") is False
            and hasattr(own.get("logger"), "set_runtime_stats_and_log")
            and all(hasattr(own.get("reducer"), f"prepare_for_{way}") for way in ("forward", "backward"))
            and _is_profiled is not None
        )
        own["_light_forward"] = _marked(_forward_lightly) if is_usual else None
        own["_straight"] = None

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's own, or `_forward_lightly`."""
        own = vars(self)
        light = own.get("_light_forward")
        # DDP's own first forwards decide on its buckets.
        if light is None or not own["_has_rebuilt_buckets"] or own["_join_config"].enable or _is_profiled():
            return super().forward(*inputs, **kwargs)
        return light(self, *inputs, **kwargs)


_is_profiled: Any = getattr(torch.autograd, "_profiler_enabled", None)


def _forward_lightly(self: _Replica, *inputs: Any, **kwargs: Any) -> Any:
    """What is left of DDP's forward."""
    own = vars(self)
    is_synchronised = own["require_backward_grad_sync"] and torch.is_grad_enabled()
    if is_synchronised:
        own["logger"].set_runtime_stats_and_log()
        own["reducer"].prepare_for_forward()
    output = own["_modules"]["module"](*inputs, **kwargs)
    own["require_forward_param_sync"] = is_synchronised
    if is_synchronised:
        own["reducer"].prepare_for_backward([])
    return output


def _forward_alone(self: _Replica, *inputs: Any, **kwargs: Any) -> Any:
    """Of a forward of which DDP is not told (straight.py)."""
    return self._modules["module"](*inputs, **kwargs)  # pyright: ignore[reportOptionalCall]


def straight_of(replica: DistributedDataParallel | None) -> Straight | None:
    """The way around the reducer, where there is one; asked for once. It holds the replica, which must not hold it: a replica that is
    replaced is to be gone at once, since its reducer hears of all backwards."""
    return vars(replica).pop("_straight", None) if replica is not None else None


@functools.cache
def _marked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, with the record's marks if DDP's own forward has them."""
    code = getattr(DistributedDataParallel.forward, "__code__", None)
    if code is None or code.co_filename != probe_training.__file__:
        return forward
    return probe_training.marked_forward(forward)


def settle_buckets(replica: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """Have DDP lay its buckets out now and not after the first update, by one backward of zeros. Collective.

    DDP does it once, in the order in which the first gradients come. Where 3 or more ranks add, the order of additions depends on
    a gradient's place in its bucket: a process that resumes would add otherwise in its first update than the run that it goes on with.
    """
    held = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    views = prepared_views(replica, parameters)
    torch.autograd.backward(views, [torch.zeros_like(p) for p in parameters])
    for p, grad in zip(parameters, held, strict=True):
        p.grad = grad


def prepared_views(
    replica: DistributedDataParallel, parameters: list[nn.Parameter]
) -> Sequence[torch.Tensor]:
    """The outputs of a forward that has nothing to compute; their backward reaches every parameter, and DDP is ready for it."""
    synchronise(replica, True)
    module, replica.module = replica.module, _Views(parameters)
    try:
        return replica()
    finally:
        replica.module = module


class _Views(nn.Module):
    """Stands in for the module."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        object.__setattr__(self, "_views_of", parameters)

    def forward(self) -> tuple[torch.Tensor, ...]:
        return tuple(p.view_as(p) for p in self._views_of)  # pyright: ignore[reportGeneralTypeIssues]


def synchronise(replica: DistributedDataParallel, is_on: bool) -> None:
    """Whether the next backward averages gradients. A plain attribute, set without nn.Module's search for parameters."""
    vars(replica)["require_backward_grad_sync"] = is_on


def unreduced(replica: DistributedDataParallel) -> list[int]:
    """Indices (among the parameters that require a gradient) that got none in the backward just done; 0.2 us when there are none.

    Without this check the bucket that holds them is never reduced: the other ranks wait, and this one learns of it in its next
    forward. Empty, too, where torch no longer offers the check; then that next forward raises.
    """
    check = getattr(replica.reducer, "_check_reducer_finalized", None)
    if check is None:
        return []
    try:
        check()
    except RuntimeError as error:
        found = _INDICES.search(str(error))
        if found is None:
            raise
        return [int(i) for i in found.group(1).split()]
    return []


def average_through(replica: DistributedDataParallel, memory: MemorySum) -> None:
    """Have the gradients of every synchronised backward averaged by `memory`, and not by the process group. Collective.

    Nothing else of DDP changes: buckets, windows without synchronisation, the search for unused parameters.
    """

    own = vars(replica)
    find: Callable[[], Straight | None] = lambda: None  # noqa: E731
    if own.get("_light_forward") is not None and straight.can_be():
        way = Straight(memory, replica, functools.partial(_prepare, own), _marked(_forward_alone))
        own["_straight"], find = way, weakref.ref(way)  # what the reducer holds must not hold the reducer

    # Without annotations: torch compares them with its own types, and refuses strings.
    def hook(state, bucket):
        is_last = bucket.is_last()
        future = memory.add(bucket.buffer(), is_last)
        if (way := find()) is not None:
            if is_last:
                way.is_told = False
            if way.is_looking:
                way.note(bucket)
        return future

    replica.register_comm_hook(None, hook)


def _prepare(own: dict[str, Any]) -> None:
    """What DDP's reducer is told by a forward."""
    own["logger"].set_runtime_stats_and_log()
    own["reducer"].prepare_for_forward()
    own["reducer"].prepare_for_backward([])


def hook_into(replica: DistributedDataParallel, take: Callable[[Any], Any]) -> None:
    """Give every bucket of a synchronised backward to `take`, which returns a future of its mean. Collective."""

    def hook(state, bucket):  # without annotations, as above
        return take(bucket)

    replica.register_comm_hook(None, hook)


def gives_sparse_gradients(module: nn.Module) -> bool:
    """Whether DDP will get sparse gradients; it looks for the same layers."""
    return any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in module.modules())


def logged(replica: DistributedDataParallel) -> dict[str, Any]:
    """What DDP knows of its buckets and of the time of its backwards, in ns; empty where this torch does not tell."""
    tell = getattr(replica, "_get_ddp_logging_data", None)
    try:
        return dict(tell()) if tell is not None else {}
    except (RuntimeError, TypeError, ValueError):
        return {}
