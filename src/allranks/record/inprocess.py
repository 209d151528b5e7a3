"""How does a script have a record without `allranks run`? `install()`, called by allranks.start().

The same marks, in the process itself: a page in a folder of its own (removed at the end), which `allranks watch --pid`
can read; and, since no agent will say it, the process tells on stderr itself what it knows when a collective fails.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic_ns
from types import ModuleType
from typing import Any

from allranks.record import farewell, process, startup, states
from allranks.record import layout as at
from allranks.record.values import Record

FOLDER_PREFIX = "allranks-record-"
# How gloo and NCCL say that a peer did not come in time, or went away.
_NOT_MET = re.compile(r"timed? ?out|closed by peer|reset by peer|connection (was )?closed", re.IGNORECASE)
_has_told = False


def install() -> None:
    """Mark the calls of torch in this process, if the launcher has not; a second time does nothing. Never raises."""
    if process.WRITER.path is not None:
        return
    try:
        _install()
    except Exception as error:  # noqa: BLE001 - a record is a help, never a reason to fail
        print(f"[allranks] no record of process {os.getpid()}: {error!r}", file=sys.stderr)


def folder_of(pid: int) -> Path | None:
    """Where process `pid` of this host keeps the record that `install` made, if it did."""
    return next(iter(sorted(_base().glob(f"{FOLDER_PREFIX}{pid}-*"))), None)


def all_records() -> list[Record]:
    """Those of all processes of this host that `install` made one for."""
    from allranks.record.page import read_pages

    return [record for folder in _base().glob(f"{FOLDER_PREFIX}*") for record in read_pages(folder)]


def _base() -> Path:
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _install() -> None:
    owner = os.getpid()
    folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{owner}-", dir=_base())
    atexit.register(_remove, folder, owner)
    # A multiprocessing child ends without atexit, but with its finalizers.
    Finalize(None, _remove, args=(folder, owner), exitpriority=0)
    _hold(folder)
    _remove_dead()
    process.open_page(folder)
    process.set_flag(at.IN_PROCESS)
    states.on_failure = communication_failed
    if startup.number_of_rank() >= 0:
        process.become(at.RANK_ROLE)
    farewell.install()
    farewell.watch_threads()
    originals = _functions()
    startup.wait_for_torch()
    _rebind(originals)
    _join_late()


_ALIVE = "alive"  # locked by its owner, whatever namespace of pids that lives in
_held = -1


def _hold(folder: str) -> None:
    global _held
    _held = os.open(f"{folder}/{_ALIVE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(_held, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_dead() -> None:
    """Remove the folders of our own processes that were killed and could not."""
    for lock in _base().glob(f"{FOLDER_PREFIX}*/{_ALIVE}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or just gone
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # it lives
        else:
            shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(descriptor)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


# Modules whose functions others may have taken by name: "from torch.distributed import all_reduce".
_TAKEN_FROM = ("torch.distributed.distributed_c10d", "torch.autograd", "torch.serialization")


def _functions() -> dict[str, dict[str, Any]]:
    return {name: dict(vars(sys.modules[name])) for name in _TAKEN_FROM if name in sys.modules}


def _rebind(originals: dict[str, dict[str, Any]]) -> None:
    """Give the marked function to every module that took the original by name before we came."""
    marked = {
        id(original): (original, vars(sys.modules[module])[name])
        for module, names in originals.items()
        for name, original in names.items()
        if vars(sys.modules[module]).get(name) is not original
    }
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            found = marked.get(id(value))
            if found is not None and found[0] is value and not name.startswith("__"):
                setattr(module, name, found[1])


def _join_late() -> None:
    """The process group may be there already."""
    dist = sys.modules.get("torch.distributed.distributed_c10d")
    if dist is not None and dist.is_initialized():
        from allranks.record import joining

        joining.has_joined(dist)


def communication_failed(error: BaseException, what: str) -> None:
    """Say on stderr, once, where this rank was when others did not come: an agent of ours would have known more."""
    global _has_told
    if _has_told or not _NOT_MET.search(str(error)):
        return
    _has_told = True
    text = _story(what, str(error).strip().splitlines()[0])
    print(text, file=sys.stderr, flush=True)
    import faulthandler

    faulthandler.dump_traceback(sys.stderr, all_threads=True)


def _story(what: str, message: str) -> str:
    from allranks.record.page import parse

    record = parse(bytes(process.WRITER.buffer), process.WRITER.path or "")
    now = monotonic_ns()
    lines = [
        f"[allranks] rank {record.rank} of {record.world_size} on host {record.host}: {what} failed: {message}",
        f"  at:    {record.line or 'unknown line'}, {(now - record.phase_since_ns) / 1e9:.1f} s inside, "
        f"step {record.step}, micro-step {record.micro_step}",
    ]
    last = record.collectives[-1] if record.collectives else None
    if last is not None:
        size = f" {list(last.shape)} {last.dtype}" if last.dtype else ""
        lines.append(
            f"  last:  {last.op}{size} in group {last.group}, sequence number {last.seq}, {last.line}"
        )
    if record.unused:
        lines.append(f"  grads: none came for {record.unused}")
    lines.append(
        "  why:   this rank waited for others; the cause is on a rank that did not come, or came with"
    )
    lines.append("         something else. `allranks run` in place of this launcher names it.")
    return "\n".join(lines)
