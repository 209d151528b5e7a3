"""Which private names of torch and of Python does the record use, and what if they are not there?

This is the only file of the record that knows them (of torch.compile: compiling.py). Each has a fallback: the fact is left out, and said
once for all on stderr if torch is not as expected where a mark would have gone. Run with torch 2.6.0, 2.13.0 and 2.14.1 (docs/limits.md).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from allranks.record import layout as at
from allranks.record import process

_has_said = False


def step_aside(what: str, error: BaseException | None = None) -> None:
    """Leave a mark out, and say so once; the job goes on. Loader workers do not say it: every epoch may have new ones."""
    global _has_said
    process.set_flag(at.STEPPED_ASIDE)
    if not _has_said and process.WRITER.words[at.W_ROLE] != at.LOADER_WORKER:
        _has_said = True
        version = getattr(sys.modules.get("torch"), "__version__", "?")
        why = f" ({error!r})" if error is not None else ""
        print(
            f"[allranks] {what}: not recorded with torch {version}{why}; the job is not touched",
            file=sys.stderr,
        )


def optimizer_step(module: ModuleType) -> Callable[..., Any] | None:
    """What torch puts around the step of each class of optimizers; the same code each time. None: it is not seen on a stack."""
    put = getattr(getattr(module, "Optimizer", None), "profile_hook_step", None)
    try:
        step = put(lambda optimizer: None) if put is not None else None
    except Exception:  # noqa: BLE001 - it takes something else in this torch
        return None
    return step if isinstance(step, FunctionType) else None


def call_at_script_end(function: Callable[[], None]) -> None:
    """Call `function` when the main thread has ended, before other threads are waited for; else it is left out."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(function)
        except RuntimeError:  # already ending
            return


# By group, how many collectives ranks issued in it without asking it (gradients through shared memory): one-element lists.
beside: weakref.WeakKeyDictionary[Any, list[list[int]]] = weakref.WeakKeyDictionary()


def sequence_number(group: Any) -> int:
    """Collectives that were issued on `group`, DDP's own included; -1 if this torch or backend cannot say."""
    try:
        return group._get_sequence_number_for_group() + sum(n for (n,) in beside.get(group, ()))
    except (AttributeError, RuntimeError, TypeError):
        return -1


def default_group(c10d: ModuleType) -> Any:
    """The default process group, None if there is none."""
    try:
        return c10d._get_default_group() if c10d.is_initialized() else None
    except (AttributeError, ValueError, RuntimeError):
        return None


def loader_iterator(module: ModuleType) -> type | None:
    """The class whose __next__ hands out batches; all others inherit it, also those of torchdata."""
    base = getattr(module, "_BaseDataLoaderIter", None)
    return base if isinstance(base, type) and "__next__" in vars(base) else None


def begins_to_take(iterator_class: type) -> bool:
    """Whether an iterator makes that of its sampler where it did."""
    return callable(vars(iterator_class).get("_reset"))


def taking_iterator(module: ModuleType) -> type | None:
    """torchdata's class that asks the sampler for the next indices."""
    found = getattr(module, "_StatefulBaseDataLoaderIter", None)
    return found if isinstance(found, type) and callable(vars(found).get("_next_index")) else None


def keeps_its_sampler(iterator_class: type) -> bool:
    """Whether the sampler's iterator is asked for its state, so that no other may stand in its place."""
    return not iterator_class.__module__.startswith("torch.utils.data.")


def sampler_iterator(iterator: Any) -> str | None:
    """The attribute of a loader's iterator that asks the sampler; None if this torch has no such."""
    return "_sampler_iter" if "_sampler_iter" in iterator.__dict__ else None


def has_no_workers(iterator: Any) -> bool:
    """Whether an iterator reads the samples itself, and so has asked for none of them before its first batch."""
    return getattr(iterator, "_num_workers", 1) == 0


def iterable_fetcher(module: ModuleType) -> type | None:
    """The class that reads a batch from an iterable data set."""
    fetcher = getattr(module, "_IterableDatasetFetcher", None)
    return fetcher if isinstance(fetcher, type) and "fetch" in vars(fetcher) else None


def loader_length(loader: Any) -> int:
    """Batches of a pass, -1 if that is not known. Leaves a loader of an iterable data set as it was: one that was asked for its length
    warns where more samples come."""
    own, name = getattr(loader, "__dict__", {}), "_IterableDataset_len_called"
    before = own.get(name)
    try:
        return len(loader)
    except Exception:  # noqa: BLE001 - no length, or the user's __len__
        return -1
    finally:
        if name in own:
            own[name] = before


def loader_workers(iterator: Any) -> list[int]:
    """The pids of an iterator's loader workers."""
    pids = [getattr(worker, "pid", None) for worker in getattr(iterator, "_workers", ())]
    return [pid for pid in pids if pid]


def worker_loop(module: ModuleType) -> Callable[..., None] | None:
    """What a loader worker runs."""
    return getattr(module, "_worker_loop", None)


def worker_id_of(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: tuple[str, ...]) -> int:
    """The worker's index among the arguments of its loop, -1 if it is not where it was."""
    if "worker_id" in kwargs:
        return int(kwargs["worker_id"])
    place = parameters.index("worker_id") if "worker_id" in parameters else -1
    found = args[place] if 0 <= place < len(args) else -1
    return found if isinstance(found, int) else -1


def map_fetcher(module: ModuleType) -> type | None:
    """The class that reads the samples of one batch from a map-style dataset."""
    fetcher = getattr(module, "_MapDatasetFetcher", None)
    return fetcher if isinstance(fetcher, type) and "fetch" in vars(fetcher) else None


def has_batched_read(fetcher: Any) -> bool:
    """Whether the dataset is handed the whole list of indices at once."""
    return bool(getattr(getattr(fetcher, "dataset", None), "__getitems__", None))


def reads_lists(fetcher: Any) -> bool:
    """Whether one fetch is a list of indices."""
    return bool(getattr(fetcher, "auto_collation", False))


def work_class() -> type | None:
    """The handle of an asynchronous collective."""
    try:
        from torch._C._distributed_c10d import Work
    except ImportError:
        return None
    return Work


def reducer_check(ddp: Any) -> Callable[[], None] | None:
    """What raises if not all gradients of `ddp` have come; None where they need not, or this torch has no such thing."""
    if getattr(ddp, "static_graph", True) or not hasattr(ddp, "require_backward_grad_sync"):
        return None
    return getattr(getattr(ddp, "reducer", None), "_check_reducer_finalized", None)


def unused_parameters(check: Callable[[], None] | None) -> str | None:
    """The parameters without a gradient after a backward, as torch names them; None if all came.

    The backward has returned, so nobody else holds the reducer. Names need TORCH_DISTRIBUTED_DEBUG=INFO, else torch
    gives indices.
    """
    if check is None:
        return None
    try:
        check()
    except RuntimeError as error:
        text = str(error)
        for pattern in (_UNUSED_NAMES, _UNUSED_INDICES):
            found = pattern.search(text)
            if found:
                return found.group(1).strip()
        return "unknown"
    return None


_UNUSED_NAMES = re.compile(r"did not receive grad for rank \d+: ([^\n]+)")
_UNUSED_INDICES = re.compile(r"did not receive grad for rank \d+:?\s*\n?\s*(?:[^:\n]*: )?([\d ,.]+)")


_AVERAGING = ("default_hooks", "powerSGD_hook", "quantization_hooks")


def keeps_equal(ddp: Any, group: Any) -> bool:
    """Whether `ddp` keeps the parameters of all ranks of `group` the same; False where that is not known."""
    if getattr(ddp, "process_group", None) is not group or not hasattr(ddp, "require_backward_grad_sync"):
        return False
    if getattr(
        ddp, "trains_apart", False
    ):  # run.model(sync_every=...): replicas differ on purpose between two means
        return False
    for hook, _ in getattr(ddp, "_comm_hooks", ()):
        module = getattr(hook, "__module__", "")
        if not module.startswith("allranks.") and module.rpartition(".")[2] not in _AVERAGING:
            return False
    return True


def ignored_parameters(ddp: Any) -> Any:
    """Names of the parameters that `ddp` was told to leave alone."""
    return getattr(ddp, "parameters_to_ignore", ())


def not_for_ddp(module: Any) -> Any:
    """Names of the parameters and buffers of `module` that DDP will leave alone."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def unsaved_buffers(module: Any) -> Any:
    """Names of the buffers of a module that are not in its state dict."""
    return getattr(module, "_non_persistent_buffers_set", ())


def saved(node: Any, name: str) -> Any:
    """What a node of a graph has kept as `name`; None if nothing, if a hook keeps it (a checkpoint computes it anew, and only once), or
    if this torch does not tell."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    return None if raw is None or getattr(raw, "unpack_hook", raw) is not None else raw.data


def shape_given(node: Any) -> tuple[int, ...] | None:
    """The shape of a node's first input, without the input; None if it has no gradient or this torch does not tell."""
    before = node.next_functions[0][0]
    known = getattr(before, "_input_metadata", None)
    return tuple(known[node.next_functions[0][1]].shape) if known else None


def last_gradient(ddp: Any) -> str:
    """The parameter whose gradient came last in the backward that goes on; lock-free, also from another thread."""
    try:
        ready_ns = ddp.reducer.get_backward_stats()
        names = [name for name, parameter in ddp.module.named_parameters() if parameter.requires_grad]
    except (AttributeError, RuntimeError):
        return ""
    if not ready_ns or len(ready_ns) != len(names):
        return ""
    newest = max(range(len(ready_ns)), key=ready_ns.__getitem__)
    return names[newest] if ready_ns[newest] > 0 else ""


def backward_stats(ddp: Any) -> Callable[[], Any]:
    """What says when each gradient of `ddp` came."""
    return getattr(getattr(ddp, "reducer", None), "get_backward_stats", list)


def ready_after_ns(stats: Callable[[], Any]) -> int:
    """Nanoseconds from the end of a DDP's forward to its last gradient, of the last backward; 0 if this torch cannot say."""
    try:
        return max(stats(), default=0)
    except (RuntimeError, TypeError):
        return 0


def replica_facts(ddp: Any) -> dict[str, Any]:
    """What `ddp` was told and has found, for the search for what is slow. 20 us; only on the thread that trains."""
    try:
        said = ddp._get_ddp_logging_data()
    except (AttributeError, RuntimeError, TypeError):
        said = {}
    sizes = str(said.get("rebuilt_bucket_sizes") or said.get("bucket_sizes") or "")
    steps = int(said.get("iteration", 0))
    return {
        "find_unused_parameters": bool(getattr(ddp, "find_unused_parameters", False)),
        "static_graph": bool(getattr(ddp, "static_graph", False)),
        "broadcast_buffers": bool(
            getattr(ddp, "broadcast_buffers", getattr(ddp, "forward_sync_buffers", False))
        ),
        "buffers": sum(1 for _ in ddp.module.buffers()),
        "bucket_cap_bytes": int(getattr(ddp, "bucket_bytes_cap", 0)),
        "bucket_bytes": [int(n) for n in sizes.split(",") if n.strip().isdigit()],
        "parameter_bytes": int(said.get("total_parameter_size_bytes", 0)),
        "unused_bytes": int(said.get("unused_parameter_size", 0)),
        "steps": min(steps, 10) + steps // 100,  # whose unused parameters torch has counted
        "hook": bool(getattr(ddp, "_comm_hooks", ())),
    }


def device_facts(ddp: Any) -> dict[str, Any]:
    """Which units of a GPU `ddp` computes on, and how exactly; empty on a CPU."""
    torch = sys.modules["torch"]
    parameter = next(ddp.module.parameters(), None)
    if parameter is None or not parameter.is_cuda:
        return {}
    major, minor = torch.cuda.get_device_capability(parameter.device)
    return {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "capability": 10 * major + minor,
        "device_name": torch.cuda.get_device_name(parameter.device),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def hook(tensor: Any, see: Callable[[Any], None]) -> Callable[[], object]:
    """Have the next gradients of a parameter seen; gives what takes the hook away. `register_hook` would take 25 us out of the cache."""
    if getattr(tensor, "_backward_hooks", see) is not None:  # others see them, too
        return tensor.register_hook(see).remove
    hooks = tensor._backward_hooks = OrderedDict()
    hooks[_OURS] = see
    return partial(hooks.pop, _OURS, None)


_OURS = -1  # torch numbers its hooks from 0


def forget_hooks(tensor: Any) -> None:
    """Nothing is left of hooks that were removed: torch would go on asking for them in each backward, which costs it 10 us."""
    hooks = getattr(tensor, "_backward_hooks", None)
    if hooks is not None and not hooks:
        tensor._backward_hooks = None


def is_autocast_on() -> bool:
    """Whether the calls of torch that follow compute in half precision."""
    torch = sys.modules["torch"]
    return bool(torch.is_autocast_enabled())


def buffers_exchange(ddp_class: type) -> str | None:
    """The method of DDP that makes buffers equal before a forward."""
    return "_sync_buffers" if callable(getattr(ddp_class, "_sync_buffers", None)) else None


def flight_entries() -> Iterator[tuple[str, str]]:
    """(source, JSON) of each flight recorder of this torch. May take 20 ms, may never return: not on a thread you need.

    JSON, never the pickled form with stacks: its first call imports torch._inductor for 2 to 6 s under the GIL.
    """
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return
    for source, name in (("nccl", "_dump_nccl_trace_json"), ("fr", "_dump_fr_trace_json")):
        dump = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            raw = dump(includeCollectives=True, onlyActive=False)
        except (RuntimeError, TypeError):
            continue
        yield source, raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def let_agent_trace(agent_pid: int) -> None:
    """Let the agent read our stack with py-spy where Yama would forbid it to (ptrace_scope 1)."""
    if agent_pid <= 0 or not os.path.exists("/proc/sys/kernel/yama/ptrace_scope"):  # noqa: PTH110
        return
    import ctypes

    set_ptracer = 0x59616D61  # PR_SET_PTRACER in linux/prctl.h
    try:
        ctypes.CDLL(None).prctl(set_ptracer, agent_pid, 0, 0, 0)
    except (OSError, AttributeError):
        return
