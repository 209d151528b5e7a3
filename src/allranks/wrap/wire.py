"""In what form do gradients cross the network? As they are, in half precision, as 8-bit numbers, or as products of thin matrices.

Each method makes the mean over a group of a flat tensor, in place; all members end with the same bits.

    none      1            nothing is lost
    bf16      1/2          8 bits of mantissa; sums of more than two members are rounded, too
    fp16      1/2          11 bits of mantissa, but values below 6e-8 become 0 and above 65504 infinite
    int8      about 1/4    8 bits of the largest value among 1,024; what is lost goes into the next update
    powersgd  often 1/50   matrices as products of rank `rank`; what is lost goes into the next update

Why not torch's powerSGD_hook: it starts collectives from callbacks, which Gloo runs on several threads, so that two buckets may meet in
another order on another rank; it needs three exchanges after one another, this two; and its state belongs to buckets, which DDP
makes anew after the first update and after a resume. The method is the same: Vogels et al. 2019, arXiv:1905.13727.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

METHODS = ("none", "bf16", "fp16", "int8", "powersgd")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BLOCK = 1024  # values that share a scale: 4 bytes in 1,028
Layout = list[tuple[str, torch.Size]]


def all_mean(tensor: torch.Tensor, group: Any) -> None:
    """The mean over the group, in place; the same bits on every member. Collective.

    Two members swap their values: as many bytes as an all-reduce, and one way's delay instead of two.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    if size > 2:
        tensor.div_(size)
        dist.all_reduce(tensor, group=group)
        return
    first, second = _gather(tensor, group)
    if tensor.dtype in HALF.values():
        tensor.copy_(first.float().add_(second).mul_(0.5))
    else:
        torch.add(first, second, out=tensor).mul_(0.5)


def _gather(mine: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Every member's tensor, in order of rank. Collective."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return every


class Method:
    """Nothing is lost; the base of the others.

    Args:
        group: The members.
        layout: Name and shape of the parameters in the flat tensor, in order.
        rank: Of powersgd's products.
    """

    name = "none"
    is_exact = True

    def __init__(self, group: Any, layout: Layout, rank: int = 4) -> None:
        self.group, self.layout, self.rank = group, layout, rank
        self.num_members = dist.get_world_size(group)

    def average(self, flat: torch.Tensor) -> None:
        """The mean over the group of `flat`, in place. Collective."""
        all_mean(flat, self.group)

    def wire_bytes(self, element_size: int) -> float:
        """What a member sends in one update, without headers."""
        return 2 * (self.num_members - 1) / self.num_members * self._values() * element_size

    def rounds(self) -> int:
        """One-way delays after one another in one update."""
        return 1 if self.num_members == 2 else 2 * (self.num_members - 1)

    def _values(self) -> int:
        return sum(shape.numel() for _, shape in self.layout)

    def state_dict(self) -> dict[str, Any]:
        """By parameter name, so that it fits other buckets, too; references, not copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What fits of another one's state_dict."""

    def take_error(self) -> torch.Tensor | None:
        """What was held back so far, for another method to send; None if nothing was."""
        return None

    def rescale(self, factor: float) -> None:
        """Gradients are `factor` times as large from now on (a loss scaler has changed its scale)."""


class Half(Method):
    """Half precision on the way; sums of two members in float32."""

    is_exact = False

    def __init__(self, group: Any, layout: Layout, rank: int = 4, *, name: str) -> None:
        super().__init__(group, layout, rank)
        self.name, self.dtype = name, HALF[name]

    def average(self, flat: torch.Tensor) -> None:
        """See Method."""
        small = flat.to(self.dtype)
        if self.num_members != 2:
            all_mean(small, self.group)
            flat.copy_(small)
            return
        first, second = _gather(small, self.group)
        flat.copy_(first).add_(second).mul_(0.5)

    def wire_bytes(self, element_size: int) -> float:
        """See Method."""
        return super().wire_bytes(2)


class Held(Method):
    """A method that keeps what it could not send, and adds it to the next update's gradients."""

    is_exact = False

    def __init__(self, group: Any, layout: Layout, rank: int = 4) -> None:
        super().__init__(group, layout, rank)
        self._error: torch.Tensor | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._loaded: Mapping[str, torch.Tensor] = {}

    def average(self, flat: torch.Tensor) -> None:
        """See Method. After an update that is not finite (a loss scaler skips it) what is held is what it was before."""
        error = self._error_for(flat)
        wanted = torch.add(flat, error, out=self._scratch("wanted", flat, flat.numel()))
        flat.copy_(wanted)
        sent = self._exchange(flat)
        low, high = torch.aminmax(flat)  # the same bits on every member, so the same answer
        if bool(torch.isfinite(low) & torch.isfinite(high)):
            torch.sub(wanted, sent, out=error)
        else:
            self._forget()

    def _exchange(self, flat: torch.Tensor) -> torch.Tensor:
        """Put the mean of what members could send into `flat`; this member's own, as the others saw it."""
        raise AssertionError

    def _scratch(self, name: str, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Memory that is used again in every update: new pages cost more than what is done with them."""
        found = self._buffers.get(name)
        if found is None or found.numel() != numel:
            found = self._buffers[name] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return found

    def _forget(self) -> None:
        """Drop what must not survive values that are not finite."""

    def _error_for(self, flat: torch.Tensor) -> torch.Tensor:
        if self._error is None:
            self._error = torch.zeros_like(flat)
            for name, part in self._parts(self._error):
                known = self._loaded.get(name)
                if known is not None and known.numel() == part.numel():
                    part.copy_(known.reshape(-1))
            self._loaded = {}
        return self._error

    def _parts(self, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        parts = flat.split([shape.numel() for _, shape in self.layout])
        return [(name, part) for (name, _), part in zip(self.layout, parts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """See Method."""
        return {"error": dict(self._parts(self._error)) if self._error is not None else dict(self._loaded)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Method."""
        self._error, self._loaded = None, dict(state.get("error", {}))

    def take_error(self) -> torch.Tensor | None:
        """See Method."""
        error, self._error = self._error, None
        return error

    def rescale(self, factor: float) -> None:
        """See Method."""
        if factor != 1.0:
            self._loaded = {name: known * factor for name, known in self._loaded.items()}
            if self._error is not None:
                self._error.mul_(factor)


class Int8(Held):
    """8-bit whole numbers and a scale for each 1,024 values. Two members swap them; more divide the sum, so that a member sends
    twice its values whatever their number. The sums are rounded again on their way back, which their owner keeps, too."""

    name = "int8"

    def _exchange(self, flat: torch.Tensor) -> torch.Tensor:
        size, numel = self.num_members, flat.numel()
        rows = -(-numel // (_BLOCK * size)) * size
        narrow = torch.empty(0, dtype=torch.float32, device=flat.device)
        padded, sent, mean = (
            self._scratch(name, narrow, rows * _BLOCK) for name in ("padded", "sent", "mean")
        )
        padded[:numel].copy_(flat)
        padded[numel:].zero_()
        mine = _pack(padded, sent)
        _unpack(mine, sent)
        if size == 2:
            theirs = _gather(mine, self.group)[1 - dist.get_rank(self.group)]
            torch.add(sent, _unpack(theirs, mean), out=mean).mul_(0.5)  # two numbers have no order
        else:
            self._divide(mine, sent, mean)
        flat.copy_(mean[:numel])
        return sent[:numel].to(flat.dtype)

    def _divide(self, mine: torch.Tensor, sent: torch.Tensor, mean: torch.Tensor) -> None:
        """Each member adds up its part of the values, and rounds the mean for the others."""
        size, count = self.num_members, mean.numel() // self.num_members
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        parts = [_unpack(part, sent.new_empty(count)) for part in theirs.chunk(size)]
        share = torch.stack(parts).sum(0).div_(size)
        packed = _pack(share, torch.empty_like(share))
        low = dist.get_rank(self.group) * count
        # What this owner could not pass on of the mean is worth `size` of its own gradients.
        sent[low : low + count] -= (share - _unpack(packed, torch.empty_like(share))) * size
        for part, into in zip(_gather(packed, self.group), mean.chunk(size), strict=True):
            _unpack(part, into)

    def wire_bytes(self, element_size: int) -> float:
        """See Method."""
        return Method.wire_bytes(self, 1) * (_BLOCK + 4) / _BLOCK

    def rounds(self) -> int:
        """See Method."""
        return 1 if self.num_members == 2 else 2 * (self.num_members - 1)


def _pack(values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Rows of 4 bytes of scale and 1,024 bytes of values; a block with a value that is not finite has no finite scale."""
    blocks = values.view(-1, _BLOCK)
    scale = torch.linalg.vector_norm(blocks, float("inf"), dim=1, keepdim=True).div_(127)
    rows = torch.empty((blocks.shape[0], 4 + _BLOCK), dtype=torch.uint8, device=values.device)
    rows[:, :4] = scale.view(torch.uint8)
    torch.mul(blocks, scale.clamp_min(1e-38).reciprocal_(), out=scratch.view(-1, _BLOCK))
    rows[:, 4:].view(torch.int8).copy_(scratch.view(-1, _BLOCK).round_().nan_to_num_(0.0))
    return rows


def _unpack(rows: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The values of `_pack`; none of a block is finite where one was not."""
    scale = rows[:, :4].contiguous().view(torch.float32)
    torch.mul(rows[:, 4:].view(torch.int8), scale, out=into.view(-1, _BLOCK))
    return into


class PowerSgd(Held):
    """Each matrix M as P Q': P = mean of M Q, made orthogonal, then Q = mean of M' P; vectors and small matrices as they are."""

    name = "powersgd"

    def __init__(self, group: Any, layout: Layout, rank: int = 4) -> None:
        super().__init__(group, layout, rank)
        self._thin: list[tuple[int, int, int, int]] = []  # place in the layout, rows, columns, rank
        self._plain: list[int] = []
        for place, (_, shape) in enumerate(layout):
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // rows if rows else 0
            thin = min(rows, columns, rank)
            if 2 * (rows + columns) * thin < rows * columns:
                self._thin.append((place, rows, columns, thin))
            else:
                self._plain.append(place)
        self._q: list[torch.Tensor] = []
        self._loaded_q: Mapping[str, torch.Tensor] = {}

    def _exchange(self, flat: torch.Tensor) -> torch.Tensor:
        parts = [part for _, part in self._parts(flat)]
        matrices = [parts[place].view(rows, columns) for place, rows, columns, _ in self._thin]
        qs = self._start(flat)
        plain = [parts[place] for place in self._plain]
        # One exchange for all that is sent as it is and for all P, one for all Q.
        ps = [m @ q for m, q in zip(matrices, qs, strict=True)]
        first = _joined([*plain, *ps], flat)
        all_mean(first, self.group)
        *plain_means, ps = _like(first, [*plain, *ps], len(plain))
        ps = [torch.linalg.qr(p.float()).Q.to(p.dtype) for p in ps]
        own = [m.t() @ p for m, p in zip(matrices, ps, strict=True)]
        second = _joined(own, flat)
        if own:
            all_mean(second, self.group)
        self._q = _like(second, own, 0)[0]
        sent = self._scratch("sent", flat, flat.numel())
        sent_parts = [part for _, part in self._parts(sent)]
        for (place, rows, columns, _), p, q in zip(self._thin, ps, self._q, strict=True):
            torch.mm(p, q.t(), out=parts[place].view(rows, columns))
            sent_parts[place].copy_(parts[place])
        for place, mean in zip(self._plain, plain_means, strict=True):
            sent_parts[place].copy_(parts[place])
            parts[place].copy_(mean)
        return sent

    def _start(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The Q of the last update, orthogonal; at first random ones, the same on every member."""
        if not self._q:
            for place, _, columns, thin in self._thin:
                known = self._loaded_q.get(self.layout[place][0])
                if known is not None and known.shape == (columns, thin):
                    self._q.append(known.to(flat.device, flat.dtype))
                    continue
                generator = torch.Generator().manual_seed(place)
                self._q.append(torch.randn(columns, thin, generator=generator).to(flat.device, flat.dtype))
            self._loaded_q = {}
        return [torch.linalg.qr(q.float()).Q.to(q.dtype) for q in self._q]

    def _forget(self) -> None:
        self._q = []

    def wire_bytes(self, element_size: int) -> float:
        """See Method."""
        numbers = sum(self.layout[p][1].numel() for p in self._plain) + sum(
            (r + c) * t for _, r, c, t in self._thin
        )
        return 2 * (self.num_members - 1) / self.num_members * numbers * element_size

    def rounds(self) -> int:
        """See Method."""
        return 2 * super().rounds()

    def state_dict(self) -> dict[str, Any]:
        """See Method."""
        named = {self.layout[t[0]][0]: q for t, q in zip(self._thin, self._q, strict=False)}
        return {**super().state_dict(), "q": named or dict(self._loaded_q)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Method."""
        super().load_state_dict(state)
        self._q, self._loaded_q = [], dict(state.get("q", {}))


def _joined(tensors: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)


def _like(flat: torch.Tensor, tensors: list[torch.Tensor], num_single: int) -> list[Any]:
    """`flat` cut into the shapes of `tensors`: the first `num_single` one by one, then a list of the rest."""
    parts = flat.split([t.numel() for t in tensors]) if tensors else ()
    cut = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    return [*cut[:num_single], cut[num_single:]]


def make_method(name: str, group: Any, layout: Layout, rank: int) -> Method:
    """The method of one of METHODS."""
    if name in HALF:
        return Half(group, layout, rank, name=name)
    kinds = {"none": Method, "int8": Int8, "powersgd": PowerSgd}
    return kinds[name](group, layout, rank)
