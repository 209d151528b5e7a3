"""What does a call of torch.distributed say? Operation, group, root, tensors, found in its arguments by their names."""

from __future__ import annotations

import inspect
import threading
from contextlib import suppress
from typing import Any

from allranks.record import compat, process, states

_writer = process.WRITER

# The argument whose shape must agree between ranks, the first of these that the function has.
_TENSORS = (
    "tensor",
    "tensors",
    "input_tensor",
    "input_tensor_list",
    "output",
    "input",
    "p2p_op_list",
)
_ROOTS = (("src", "group_src"), ("dst", "group_dst"))
_MAX_TENSORS = 64  # of a list whose sizes are added up

# Numbers of strings; gone when the page's room for strings starts over.
_groups: dict[
    int, tuple[int, int, Any]
] = {}  # id of the group: name, ranks, the group (kept: its id stays its own)
_names: dict[Any, int] = {}  # of dtypes and reduce operations
_waits: dict[int, int] = {}  # number of an operation's name: number of "wait(name)"
_writer.on_strings_full += [_groups.clear, _names.clear, _waits.clear]


class Call:
    """How to read the arguments of one function."""

    __slots__ = ("_group", "_op", "_ranks", "_roots", "_tensor", "is_counted", "module", "name")

    def __init__(self, name: str, signature: inspect.Signature, module: Any, is_counted: bool) -> None:
        names = list(signature.parameters)

        def place(parameter: str) -> tuple[int, str] | None:
            return (names.index(parameter), parameter) if parameter in names else None

        self.name, self.module, self.is_counted = name, module, is_counted
        self._group = place("group")
        self._op = place("op")
        self._ranks = place("ranks")
        self._tensor = next((found for name in _TENSORS if (found := place(name))), None)
        pair = next((pair for pair in _ROOTS if place(pair[0])), None)
        self._roots = (place(pair[0]), place(pair[1])) if pair else None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], thread: int, line: int) -> int:
        """A slot of the ring for this call; -1 if this rank is not in the group. Never raises."""
        try:
            return self._enter(args, kwargs, thread, line)
        except Exception as error:  # noqa: BLE001 - arguments that torch itself will refuse, or an unknown torch
            del error
            return _writer.enter_collective(_writer.string(self.name), line=line, is_counted=self.is_counted)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], thread: int, line: int) -> int:
        group = _argument(self._group, args, kwargs) if self._group else None
        if group is None:
            group = states.world
        elif isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER
            return -1
        name, ranks = _group_numbers(group, self.module)
        shape, dtype, numel, num_tensors = (), 0, 0, 0
        tensor = _argument(self._tensor, args, kwargs) if self._tensor else None
        if tensor is not None:
            with suppress(AttributeError, TypeError):  # no tensor: torch itself will say so
                shape, dtype, numel, num_tensors = _sizes(tensor)
        reduce_op = _argument(self._op, args, kwargs) if self._op else None
        if self._ranks:  # new_group: which ranks are to be in it
            wanted = _argument(self._ranks, args, kwargs)
            ranks = _writer.string(_ranks_text(wanted)) if wanted is not None else 0
        return _writer.enter_collective(
            _writer.string(self.name),
            name,
            ranks=ranks,
            seq=compat.sequence_number(group) if group is not None else -1,
            reduce_op=0 if self._op is None else _reduce_number(reduce_op),
            root=-1 if self._roots is None else self._root(args, kwargs, group),
            dtype=dtype,
            shape=shape,
            numel=numel,
            num_tensors=num_tensors,
            line=line,
            thread=self.thread_name(thread),
            is_counted=self.is_counted,
        )

    def _root(self, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> int:
        assert self._roots is not None
        root, in_group = (_argument(place, args, kwargs) if place else None for place in self._roots)
        if isinstance(root, int):
            return root
        if isinstance(in_group, int):
            return self.module.get_global_rank(group, in_group)
        return 0 if self.name.startswith(("gather", "scatter", "reduce", "broadcast")) else -1

    @staticmethod
    def thread_name(thread: int) -> int:
        """The number of a thread's name; 0 for the one that trains."""
        return 0 if thread == _writer.owner else _writer.string(threading.current_thread().name)

    @staticmethod
    def wait_of(op: int) -> int:
        """The number of "wait(op)"."""
        known = _waits.get(op)
        if known is None:
            known = _waits[op] = _writer.string(f"wait({_writer.name_of(op)})")
        return known


def forget_groups() -> None:
    """Groups were made or destroyed: an id may be another's now."""
    _groups.clear()


def _argument(place: tuple[int, str] | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if place is None:
        return None
    index, name = place
    return args[index] if index < len(args) else kwargs.get(name)


def _group_numbers(group: Any, module: Any) -> tuple[int, int]:
    known = _groups.get(id(group))
    if known is None:
        known = _groups[id(group)] = *_describe_group(group, module), group
    return known[0], known[1]


def _describe_group(group: Any, module: Any) -> tuple[int, int]:
    if group is None:
        return 0, 0
    if group is states.world:
        return _writer.string("default"), 0
    name = getattr(group, "group_desc", "") or ""
    name = name if name and name != "undefined" else f"group {getattr(group, 'group_name', '?')}"
    return _writer.string(name), _writer.string(_ranks_text(module.get_process_group_ranks(group)))


def _ranks_text(ranks: Any) -> str:
    return ",".join(str(rank) for rank in ranks)


def _reduce_number(op: Any) -> int:
    if op is None:
        return _writer.string("SUM")
    try:
        known = _names.get(op)
    except TypeError:  # a premultiplied sum
        return _writer.string(_reduce_name(op))
    if known is None:
        known = _names[op] = _writer.string(_reduce_name(op))
    return known


def _reduce_name(op: Any) -> str:
    name = getattr(op, "name", None) or getattr(getattr(op, "op", None), "name", None)
    return name or str(op).rsplit(".", 1)[-1]


def _sizes(tensor: Any) -> tuple[tuple[int, ...], int, int, int]:
    """Shape and dtype of the (first) tensor, elements of all, how many."""
    if isinstance(tensor, (list, tuple)):
        tensors = [getattr(item, "tensor", item) for item in tensor[:_MAX_TENSORS]]
        if not tensors:
            return (), 0, 0, 0
        shape, dtype, _, _ = _sizes(tensors[0])
        return shape, dtype, sum(item.numel() for item in tensors), len(tensor)
    dtype = tensor.dtype
    number = _names.get(dtype)
    if number is None:
        number = _names[dtype] = _writer.string(str(dtype).removeprefix("torch."))
    return tuple(tensor.shape), number, tensor.numel(), 1
