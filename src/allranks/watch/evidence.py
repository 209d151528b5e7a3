"""What was known of a job at one moment?

Everything a verdict may rest on, as plain frozen values: what the ranks' records, the kernel, the stacks and the network
said. No processes, clocks or sockets in here, and all of it goes to JSON and back, so that an incident can be kept,
decided again later, and become a test.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from allranks.watch.observed import Caught, Check, FileLock, Loop, NotFinite, Socket, Value
from allranks.watch.verdict import Place

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stack:
    """One Python thread: where it stands, innermost frame first."""

    frames: tuple[Place, ...]
    thread: str = ""
    is_main: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as the user's line called it."""

    op: str
    """'all_reduce', 'barrier', 'new_group', 'wait(all_reduce)', ..."""
    number: int = 0
    """Counts this process's calls."""
    group: str = ""
    """Name of the process group."""
    members: str = ""
    """Ranks of the group, '0,2,3'; empty = all."""
    seq: int = -1
    """Collectives this rank had issued in the group before it, DDP's own included; -1 = not known."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    numel: int = 0
    num_tensors: int = 0
    reduce_op: str = ""
    root: int = -1
    where: Place | None = None
    thread: str = ""
    """Empty = the main thread."""
    step: int = 0
    age_s: float = 0.0
    """Seconds since it was entered."""
    is_inside: bool = False
    """It has not come back."""
    is_async: bool = False
    was_waited: bool = False
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Loader:
    """One pass over a data loader."""

    number: int = 1
    drawn: int = 0
    length: int = -1
    where: Place | None = None
    num_workers: int = 0
    is_exhausted: bool = False
    asked_s: float = 0.0
    """Seconds since the last batch was asked for."""


@dataclass(frozen=True, slots=True)
class Model:
    """The newest model given to DDP."""

    number: int = 0
    num_parameters: int = 0
    hash: int = 0
    """Equal where names, shapes, dtypes and requires_grad are equal."""
    parameters: tuple[str, ...] = ()
    """'head.weight float32 [10, 64] trained', if they were asked for."""
    where: Place | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """An exception that the process itself wrote down."""

    kind: str
    message: str = ""
    where: Place | None = None
    thread: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What the rank's record page said."""

    step: int = 0
    """Optimizer steps ended."""
    micro_step: int = 0
    epoch: int = 0
    phase: str = "start"
    """start import init build python data forward backward optimizer collective checkpoint evaluate exit."""
    phase_s: float = 0.0
    """Seconds since the phase began."""
    tick_s: float = 0.0
    """Seconds since the page's tick thread last ran: grows when the process is stopped or the GIL is held."""
    median_step_s: float = 0.0
    where: Place | None = None
    """The user's line of the phase."""
    is_seen: bool = False
    """Phase and line are what was seen last in a quick step, up to 0.4 s before."""
    calls: tuple[Call, ...] = ()
    """The newest calls, oldest first."""
    issued: int = 0
    """Collectives the user's lines called."""
    issued_at_step: int = 0
    group_seq: int = -1
    """Collectives issued in the default group, DDP's included; at most 0.1 s old, in quick steps some 0.2 s; -1 = not known."""
    group_seq_at_step: int = -1
    num_groups: int = 0
    loader: Loader | None = None
    loader_before: Loader | None = None
    unused: str = ""
    """Parameters that got no gradient in the newest backward, by name."""
    parameter: str = ""
    """The parameter whose gradient came last."""
    model: Model | None = None
    exception: Words | None = None
    thread_exception: Words | None = None
    exit_kind: str = ""
    """'' (not ended, or without a word), 'ended', 'exception', 'system_exit', 'hard_exit'."""
    exit_code: int = 0
    exit_where: Place | None = None
    is_destroyed: bool = False
    """destroy_process_group has returned."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Seconds per phase since the start."""
    said_rank: int = -1
    """The rank and world size by which the process itself goes (its environment, or what it gave to init_process_group)."""
    said_world_size: int = -1
    has_torch: bool = False
    is_probed: bool = False
    """It is of a record page, and counts steps; else it was told from a stack."""
    not_finite: NotFinite | None = None
    checks: tuple[Check, ...] = ()
    """The newest fingerprints, oldest first."""
    checked: tuple[str, ...] = ()
    """The parameters in them."""
    noted: tuple[dict[str, Any], ...] = ()
    """What it said once of its data, replicas and files (record/notes.py), oldest first."""

    @property
    def inside(self) -> Call | None:
        """The last call that has not come back, of the main thread if it has one."""
        open_calls = [c for c in self.calls if c.is_inside]
        return next((c for c in reversed(open_calls) if not c.thread), open_calls[-1] if open_calls else None)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that ended a rank."""

    kind: str
    """'IndexError'."""
    message: str
    frames: tuple[Place, ...] = ()
    """Innermost first."""
    text: tuple[str, ...] = ()
    """The traceback as it was printed."""
    cause: str = ""
    """'ValueError: ...' of the exception it was raised from, if any."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended."""

    code: int
    signal: int | None = None
    at_s: float = 0.0
    """Seconds since the ranks were started."""
    by_us: bool = False
    asked: bool = False
    """The agent or the user asked for it."""

    @property
    def failed(self) -> bool:
        """Whether it ended other than by exit code 0."""
        return self.code != 0 or self.signal is not None


@dataclass(frozen=True, slots=True)
class Worker:
    """One loader worker, or another child process, of a rank."""

    pid: int
    index: int | None = None
    """Its number among the loader's workers; None: not known, or not a loader worker."""
    state: str = ""
    wchan: str = ""
    is_loader: bool = False
    command: str = ""
    stacks: tuple[Stack, ...] = ()
    item: str = ""
    """The index it was asked for."""
    item_s: float = 0.0
    cpu_share: float = 0.0
    exit: Exit | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank."""

    rank: int
    host: str = ""
    node_rank: int = 0
    local_rank: int = 0
    pid: int = 0
    state: str = ""
    """The kernel's letter: R S D T t Z; empty = gone or not known."""
    wchan: str = ""
    """The kernel function the main thread sleeps in."""
    cpu_share: float = 0.0
    """Processor time over wall time while evidence was taken, all threads: 1.0 = one core busy."""
    main_cpu_share: float = 0.0
    is_moving: bool = False
    """Two stacks a moment apart differ in the user's line."""
    stood_s: float = 0.0
    """Since an earlier look at which its main thread was at the same lines; 0 = it was not, or there was none."""
    runs_model: bool = False
    """One of its stacks was inside a torch module."""
    run_queue_share: float = 0.0
    """Share of the time it was ready to run but got no core."""
    host_load: float = 0.0
    """Processes that want a core, for each core of its host, over a minute."""
    record: Record | None = None
    stacks: tuple[Stack, ...] = ()
    stacks_from: str = ""
    crash: tuple[Stack, ...] = ()
    """The stacks faulthandler wrote as the process died."""
    crash_reason: str = ""
    exit: Exit | None = None
    failure: Failure | None = None
    output: tuple[str, ...] = ()
    """The last lines it printed."""
    sockets: tuple[Socket, ...] = ()
    workers: tuple[Worker, ...] = ()
    file_lock: FileLock | None = None
    open_files: tuple[str, ...] = ()
    """Regular files open for writing."""
    tracer: str = ""
    """The command that traces it (gdb, strace), if any."""
    guard: Place | None = None
    """The `if` on the rank around the line it stands at."""
    is_cleaning_up: bool = False
    """It stands in an `except` or `finally`: an error may be on its way."""
    condition: Place | None = None
    """The innermost `if` or `while` around the line it stands at, in its function."""
    values: tuple[Value, ...] = ()
    """Of the names in the line on which it depends that ranks part (peeking.py)."""
    caught: tuple[Caught, ...] = ()
    """Errors after which it went on, oldest first."""
    handlers: tuple[Place, ...] = ()
    """Those `except` around the lines it stands at that would take an error and go on."""
    loops: tuple[Loop, ...] = ()
    """Of the user's frames of its main thread, innermost first; frames in no loop are left out."""
    notes: dict[str, str] = field(default_factory=dict)
    """What else was found out at the exit: 'exists' = the path its error did not find, and that is there now."""
    is_by_row: bool = False
    """Its node did not answer (in time): only its newest row is known."""
    related: tuple[Place, ...] = ()
    """Other lines of its program that belong to its error (related.py)."""

    @property
    def is_alive(self) -> bool:
        """Whether the process is there and has not ended."""
        return self.exit is None and self.state not in ("", "Z", "X")


@dataclass(frozen=True, slots=True)
class Node:
    """One node and what its kernel said."""

    node_rank: int
    host: str
    ranks: tuple[int, ...] = ()
    is_lost: bool = False
    lost_why: str = ""
    lost_s: float = 0.0
    address: str = ""
    oom_kills: int = 0
    """Processes the kernel killed for memory since the job began."""
    memory_limit_bytes: int | None = None
    memory_peak_bytes: int | None = None
    shm_size_bytes: int | None = None
    shm_free_bytes: int | None = None
    disk_free_bytes: int | None = None
    num_cores: int | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that works longer per step than the others, measured over some seconds."""

    rank: int
    own_s: float
    """Its own work per step: wall time without waiting for others."""
    others_s: float
    """The same of the other ranks, at most."""
    excess_s: float
    step_s: float
    phase: str
    """The phase in which most of the excess lies."""
    since_s: float = 0.0
    places: tuple[Place, ...] = ()
    """Lines of the user's at which it was seen, the most frequent first."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known at one moment."""

    world_size: int
    ranks: tuple[Rank, ...]
    nodes: tuple[Node, ...] = ()
    cwd: str = ""
    age_s: float = 0.0
    """Seconds since the ranks were started."""
    trigger: str = ""
    """Why it was taken: 'exit', 'stopped', 'waiting', 'mismatch', 'lost', 'slow', 'asked'."""
    here: int | None = None
    """node_rank of the node that decides, where it sees only itself."""
    hub: int = 0
    limit_s: float | None = None
    """The process group's timeout, if known."""
    waiting: tuple[int, ...] = ()
    """Ranks that the trigger saw waiting for others."""
    slow: Slow | None = None

    def rank(self, number: int) -> Rank | None:
        """The rank of this number, if anything is known of it."""
        return next((r for r in self.ranks if r.rank == number), None)

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dumps; `from_json(Evidence, ...)` is the way back."""
        return to_json(self)


def to_json(value: Any) -> dict[str, Any]:
    """A dataclass as plain values, without what has its default: incidents stay readable."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if item != default:
            out[f.name] = _plain(item)
    return out


def _plain(item: Any) -> Any:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return to_json(item)
    if isinstance(item, tuple | list):
        return [_plain(i) for i in item]
    return dict(item) if isinstance(item, dict) else item


def from_json(kind: type[T], values: dict[str, Any]) -> T:
    """The dataclass that `to_json` made plain; keys this version does not know are left out."""
    hints = typing.get_type_hints(kind)
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: _typed(hints[k], v) for k, v in values.items() if k in known})


def _typed(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _typed(next(a for a in typing.get_args(hint) if a is not type(None)), value)
    if origin is tuple:
        return tuple(_typed(typing.get_args(hint)[0], v) for v in value)
    if dataclasses.is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]
    return value
