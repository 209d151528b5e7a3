"""What does run.model() give back? The user's module, moved and replicated, which is called and saved as if it were plain."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.comm.values import from_rank_zero
from allranks.wrap.agreement import require_same_model
from allranks.wrap.batchnorm import convert_batchnorm
from allranks.wrap.buffers import BufferSync
from allranks.wrap.exchange import Exchange, connect
from allranks.wrap.local import LocalSteps
from allranks.wrap.options import LOOK_AT, Choice, Given, Seen, Way, choose
from allranks.wrap.precision import Precision
from allranks.wrap.reducer import (
    logged,
    prepared_views,
    replicate,
    settle_buckets,
    straight_of,
    synchronise,
    unreduced,
)
from allranks.wrap.settings import CompressSettings, LocalSettings
from allranks.wrap.straight import Bucket, Straight

_is_trainable = attrgetter("requires_grad")  # with all() and any(): no Python code for each parameter
_set = (
    object.__setattr__
)  # for what changes in each step: nn.Module's own first looks whether it is a parameter, 15 calls of Python


class Window:
    """What a forward needs to know of the step it is in; one object shared by the loop, its models and its loaders."""

    __slots__ = ("is_last", "local", "num_samples")

    def __init__(self) -> None:
        self.is_last = True  # this micro-batch closes its window: gradients are synchronised
        self.local = 0  # > 0 inside evaluation: no communication at all
        self.num_samples: int | None = None  # this rank's real samples in the micro-batch; 0 for a stand-in


class Model(nn.Module):
    """A module on its device and, with more than one rank, replicated by DDP. Call it, save it, ask it as the plain module.

    Parameter, buffer and state-dict names are the plain module's, without `module.`. Attributes it does not have itself are the plain
    module's. With gradients enabled and outside evaluation, a call is a part of the step: on the last micro-batch of a window the
    backward that follows is **collective**; every other call communicates nothing, so ranks may evaluate on their own.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        *,
        world_size: int,
        window: Window | None = None,
        precision: Precision | None = None,
        name: str = "model",
        sync_batchnorm: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        shared_memory: bool | Literal["auto"] = "auto",
        compress: CompressSettings | None = None,
        local: LocalSettings | None = None,
    ) -> None:
        super().__init__()
        self.window = window or Window()
        if sync_batchnorm and world_size > 1:
            module = convert_batchnorm(module, self.window, device)
        self.module = module.to(device)
        self._settings = (device, name, find_unused_parameters, static_graph, bucket_cap_mb)
        self._autocast = precision.autocast if precision is not None and precision.dtype is not None else None
        self._world_size = world_size
        self.buffers_sync = BufferSync(plain(self.module))
        self.pending = False  # a forward prepared DDP for a backward that has not come yet
        self._is_noted = False
        self.is_reduced = False  # the backward of this update averaged the gradients already
        self._is_straight = False  # the backward of this update is done by `backward_straight`
        self._without: list[nn.Parameter] = []  # what it has averaged without a gradient of this rank
        self.name = name
        self._joined: list[int] | None = (
            None  # this rank gave zeros in this window: parameters without a gradient of its own
        )
        self._shared_memory = shared_memory
        self._compress, self._local = compress or CompressSettings(), local or LocalSettings()
        self._scaler = precision.scaler if precision is not None else None
        self.exchange: Exchange | None = None  # None: DDP's own, or memory alone
        self._is_in_memory = False
        self.local_steps: LocalSteps | None = None  # where ranks train apart between two synchronisations
        self.on_choice: Any = None  # told what compress="auto" has chosen
        self.choices: list[Choice] = []  # DDP's options, once the first updates were looked at
        self.on_options: Callable[[list[Choice]], None] | None = None  # told them
        self._num_updates = 0
        object.__setattr__(self, "_replica", None)  # not a submodule: its names would come twice
        self.straight: Straight | None = None  # around DDP's reducer, where that can be
        self._wrap()

    # -- replication ---------------------------------------------------------------------------------------------------------

    def _wrap(self) -> None:
        """(Re)build DDP over what is trainable now. Collective."""
        device, name, find_unused, static_graph, bucket_cap_mb = self._settings
        if self.local_steps is not None:
            self.local_steps.synchronize()  # DDP gives rank 0's weights to all
        if self.straight is not None:
            self.straight.forget()  # a forward without a backward: the DDP it was for is told of none any more
        named = list(plain(self.module).named_parameters())
        self._frozen = [p for _, p in named if not p.requires_grad]
        self.trainable = [p for _, p in named if p.requires_grad]
        self.trainable_names = [n for n, p in named if p.requires_grad]
        if self._world_size > 1 and self.trainable:
            require_same_model(plain(self.module), name)
            replica = replicate(
                self.module,
                device,
                bucket_cap_mb=bucket_cap_mb,
                static_graph=static_graph,
                find_unused_parameters=find_unused,
            )
            self._connect(replica, [(n, p) for n, p in named if p.requires_grad])
            object.__setattr__(self, "_replica", replica)
            self.straight = straight_of(replica)
            replica.train(self.training)
            self._go_straight()
            if self._world_size > 2 and self._way == "group" and not (find_unused or static_graph):
                settle_buckets(replica, self.trainable)

    def _connect(self, replica: DistributedDataParallel, named: list[tuple[str, nn.Parameter]]) -> None:
        """Decide how gradients, or weights, get from rank to rank. Collective."""
        before, apart = self.exchange, self.local_steps
        self.exchange, self._is_in_memory = connect(
            replica,
            named,
            self._settings[0],
            self.name,
            shared_memory=self._shared_memory,
            settings=self._compress,
            scale_of=self._scaler.get_scale if self._scaler is not None else None,
        )
        if self.exchange is not None:
            if self.exchange.chooser is not None:
                self.exchange.chooser.on_choice = lambda choice: self.on_choice and self.on_choice(choice)
            if before is not None:
                self.exchange.load_state_dict(before.state_dict())
        if self._local.every > 1:
            object.__setattr__(replica, "trains_apart", True)  # for the record, which compares replicas
            mean = self.exchange.mean if self.exchange is not None else None
            self.local_steps = LocalSteps(named, self._local, mean)
            if apart is not None:
                self.local_steps.load_state_dict(apart.state_dict(), None)

    def after_update(self, some_unused: bool) -> None:
        """Once, after the first updates: choose DDP's options by what was seen. **Collective** then."""
        if self._num_updates > LOOK_AT:
            return
        self._num_updates += 1
        replica = self.replica
        if self._num_updates != LOOK_AT or replica is None:
            return
        _, _, find_unused, static_graph, bucket_cap_mb = self._settings
        seen = Seen(
            self._world_size,
            self._way,
            logged(replica),
            some_unused,
            tuple(self.buffers_sync.changing),
            has_buffers=any(True for _ in plain(self.module).buffers()),
        )
        mine = choose(Given(bucket_cap_mb, find_unused, static_graph), seen)
        self.choices = from_rank_zero(mine)  # each rank has timed its own backwards
        changed = {c.option: c.value for c in self.choices if c.is_changed}
        if "bucket_cap_mb" in changed:
            self._settings = (*self._settings[:4], changed["bucket_cap_mb"])
            self._wrap()
        self._go_straight()
        if self.on_options is not None:
            self.on_options(self.choices)

    def _go_straight(self) -> None:
        """From now on, where it can be: once DDP has told what its options are chosen by."""
        if self._num_updates >= LOOK_AT and self.straight is not None:
            self.straight.is_wanted = True

    @property
    def _way(self) -> Way:
        """How gradients get from rank to rank."""
        if self.local_steps is not None:
            return "apart"
        if self.exchange is None:
            return "memory" if self._is_in_memory else "group"
        if self.exchange.is_by_bucket:
            return "group"
        is_open = self.exchange.chooser is not None and self.exchange.hosts is None
        return "auto" if is_open else "at once"

    @property
    def is_apart(self) -> bool:
        """Whether ranks may hold different weights of it now, on purpose."""
        return self.local_steps is not None and self.local_steps.is_apart

    @property
    def replica(self) -> DistributedDataParallel | None:
        """The DDP object underneath; None with one rank or without trainable parameters."""
        return self._replica  # pyright: ignore[reportReturnType]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's forward, under autocast where asked for."""
        replica, window = self._replica, self.window
        target: Any = None
        if replica is not None and not window.local and torch.is_grad_enabled():
            if window.is_last:
                if not all(map(_is_trainable, self.trainable)) or any(map(_is_trainable, self._frozen)):
                    self._wrap()  # frozen or unfrozen since: DDP only knows what was trainable when it was built
                    replica = self._replica
                _set(self, "pending", self.local_steps is None)
            if not self._is_noted:
                self._is_noted = True
                self.buffers_sync.note()
            if replica is not None:
                is_synchronised = window.is_last and self.local_steps is None
                synchronise(replica, is_synchronised)
                way = self.straight
                is_straight = way is not None and is_synchronised and way.expect()
                # Nobody has a hook on the replica.
                target = way.forward if way is not None and is_straight else replica.forward
        if target is None:
            target = self._modules["module"]
        if self._autocast is None:
            return target(*args, **kwargs)
        return self._autocast(target, args, kwargs)

    def goes_straight(self) -> bool:
        """Whether the backward that comes now is to be done by `backward_straight`, since DDP was not told of it."""
        is_straight = self.straight is not None and self.straight.take()
        _set(self, "_is_straight", is_straight)
        return is_straight

    def backward_straight(self, loss: torch.Tensor, gradient: torch.Tensor, retain_graph: bool) -> None:
        """`loss.backward(gradient, ...)` after `goes_straight`; a module may have a `backward` of its own. Collective."""
        way = self.straight
        assert way is not None
        _set(self, "_without", way.run(loss, gradient, retain_graph, way))

    def join_with_zero(self) -> None:
        """Take part in the synchronised backward of the others with zeros, for a loss this rank does not have. Collective."""
        replica = self.replica
        if replica is None:
            return
        if self.local_steps is not None:
            for p in self.trainable:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            return
        mine = self.trainable
        views = [p.view_as(p) for p in mine] if self.pending else prepared_views(replica, mine)
        self._joined = [i for i, p in enumerate(self.trainable) if p.grad is None]
        torch.autograd.backward(views, [torch.zeros_like(p) for p in self.trainable])
        self.pending = True

    def complete(self) -> tuple[list[int], bool]:
        """After a synchronised backward: give zeros for parameters that got no gradient, so that no bucket is left waiting.

        Returns:
            Indices into `trainable` of the parameters without a gradient from this rank in the whole window, and whether that is
            because the rank gave no loss. Usually none, which is known in 0.2 us.
        """
        replica = self._replica
        _set(self, "pending", False)
        _set(self, "is_reduced", False)
        if self._joined is not None:
            unused, self._joined = self._joined, None
            return unused, True
        if self._is_straight and self.straight is not None:
            _set(self, "_is_straight", False)
            self.straight.place()
            ids = {id(p) for p in self._without}
            return [i for i, p in enumerate(self.trainable) if id(p) in ids] if ids else [], False
        missing = unreduced(replica) if replica is not None else []
        if not missing:
            return [], False
        unused = [i for i in missing if self.trainable[i].grad is None]
        parameters = [self.trainable[i] for i in missing]
        frozen = [p for p in parameters if not p.requires_grad]
        for p in frozen:
            p.requires_grad_(True)
        torch.autograd.backward([p.view_as(p) for p in parameters], [torch.zeros_like(p) for p in parameters])
        for p in frozen:
            p.requires_grad_(False)
            p.grad = None
        return unused, False

    def complete_in_one_piece(self) -> Bucket | None:
        """After a synchronised backward: its gradients, which are not the parameters' yet, if they lie one after the other and this rank
        had all of them. If not, nothing has happened: `complete` does it."""
        way = self.straight
        if not self._is_straight or self._without or way is None or self._joined is not None:
            return None
        if (bucket := way.only_bucket) is not None:
            _set(self, "pending", False)
            _set(self, "is_reduced", False)
            _set(self, "_is_straight", False)
        return bucket

    # -- plain names ---------------------------------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[Any, None, None]:
        """The plain module's."""
        yield from plain(self.module).named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The plain module's, without prefixes."""
        return plain(self.module).state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Into the plain module; the same file on every rank, or only what rank 0 loads counts at the next wrap."""
        return plain(self.module).load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules["module"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        # A process group cannot be copied, and a copy that still communicated would be a trap (EMA, target networks).
        import copy

        return copy.deepcopy(plain(self.module), memo)

    def __reduce__(self) -> Any:
        return _identity, (plain(self.module),)


def _identity(module: nn.Module) -> nn.Module:
    return module


def plain(module: nn.Module) -> nn.Module:
    """The user's own module beneath any wrapper: ours, DDP's, torch.compile's."""
    while True:
        inner = module._modules.get("_orig_mod")
        if inner is None and isinstance(module, (Model, DistributedDataParallel)):
            inner = module._modules.get("module")
        if inner is None:
            return module
        module = inner
