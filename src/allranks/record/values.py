"""What is in a record? The values that a reader of pages gets, and that recorded evidence is made of.

All `_ns` are CLOCK_MONOTONIC of the host of the process (`time.monotonic_ns()`), never to be compared across
hosts. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from allranks.record import layout as at


class Phase(IntEnum):
    """What a process is doing; PYTHON is the user's code between calls that are marked."""

    START = at.START
    IMPORT = at.IMPORT
    INIT = at.INIT
    BUILD = at.BUILD
    PYTHON = at.PYTHON
    DATA = at.DATA
    FORWARD = at.FORWARD
    BACKWARD = at.BACKWARD
    OPTIMIZER = at.OPTIMIZER
    COLLECTIVE = at.COLLECTIVE
    CHECKPOINT = at.CHECKPOINT
    EVALUATE = at.EVALUATE
    EXIT = at.EXIT
    COPY = at.COPY
    LOG = at.LOG


class Role(IntEnum):
    """What a process is in the job."""

    OTHER = at.OTHER
    RANK = at.RANK_ROLE
    LOADER_WORKER = at.LOADER_WORKER


class ExitKind(IntEnum):
    """How a process went, as far as it could say."""

    NOT_ENDED = at.NOT_ENDED  # still there, or killed without a word
    ENDED = at.ENDED  # the script came to its end
    EXCEPTION = at.ENDED_BY_EXCEPTION
    SYSTEM_EXIT = at.SYSTEM_EXIT  # sys.exit or SystemExit
    HARD_EXIT = at.HARD_EXIT  # os._exit


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective (or send/recv, or wait) as the user's call entered it."""

    number: int  # 1, 2, 3 ... of this process, by calls
    op: str  # "all_reduce", "broadcast_object_list", "wait(all_reduce)", "send"
    group: str  # name of the process group
    ranks: str  # "" = all ranks, else "0,2,3"
    seq: int  # sequence number of the group before the call, -1 unknown
    reduce_op: str  # "SUM" ... or ""
    root: int  # global rank of root, source or destination, -1 if it has none
    dtype: str
    shape: tuple[int, ...]  # of the first tensor, at most 6 dims
    numel: int  # over all tensors of the call
    num_tensors: int
    line: str  # the user's line, "file:line function"
    thread: str  # "" = main thread
    step: int
    entered_ns: int
    exited_ns: int  # 0 = still inside
    is_async: bool  # the call returned a handle; exited is when the call returned
    was_waited: bool
    has_failed: bool  # the call raised

    @property
    def is_inside(self) -> bool:
        """Whether the call has not come back."""
        return self.exited_ns == 0


@dataclass(frozen=True, slots=True)
class Loader:
    """One pass over a DataLoader."""

    number: int  # 1, 2, ... passes of this process
    drawn: int  # batches handed to the user
    length: int  # len(loader), -1 unknown
    line: str  # where the pass began
    num_workers: int
    started_ns: int
    ended_ns: int  # 0 = not exhausted
    asked_ns: int  # when the batch that is waited for was asked for, 0 = none is


@dataclass(frozen=True, slots=True)
class LastWords:
    """An exception that ended the script, or a thread."""

    type: str
    message: str
    line: str  # the innermost line of the user's code
    thread: str  # "" = main thread
    at_ns: int


@dataclass(frozen=True, slots=True)
class Exit:
    """How the process went."""

    kind: ExitKind
    code: int
    line: str  # of sys.exit or os._exit
    at_ns: int


@dataclass(frozen=True, slots=True)
class Model:
    """The last model given to DistributedDataParallel; all of them are in `<pid>.models.jsonl`."""

    number: int  # how many were built
    num_parameters: int
    hash: int  # equal where names, shapes, dtypes and requires_grad are equal


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first loss of this process that was nan or infinite when backward was called on it."""

    step: int  # the step it was in, 1 = the first
    kind: str  # "nan", "inf", "-inf"
    line: str  # of the call of backward
    at_ns: int
    sound: int  # the last step before it whose losses were looked at and were finite


@dataclass(frozen=True, slots=True)
class Check:
    """The fingerprint of all parameters of the DDP modules after a step."""

    step: int  # counted by forwards of DDP whose backward averages gradients
    seq: int  # collectives issued in the default group until then; ranks are compared where both are equal
    hash: int
    num_steps: int = 0  # optimizer steps until then


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time went until one moment, at most 0.1 s ago; in quick steps 0.4 s."""

    at_ns: int
    step: int
    phase_ns: dict[Phase, int]  # cumulative, the phase that goes on included
    buffers_ns: int  # of FORWARD: DDP's exchange of buffers
    exchanged_ns: int  # of BACKWARD, in timed steps: from the last gradient on
    exchanged_of_ns: int  # all of BACKWARD in those steps
    loss: float | None  # the last that was looked at


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The moments of one step; 0 = it has no such moment. Of several micro-steps the last."""

    step: int
    start_ns: int  # the step before ended
    data_from_ns: int
    data_to_ns: int
    forward_from_ns: int
    forward_to_ns: int
    buffers_from_ns: int
    buffers_to_ns: int
    backward_from_ns: int
    ready_ns: int  # the last gradient was there
    backward_to_ns: int
    optimizer_from_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Glance:
    """What a poll needs, at a few microseconds; the same names as in Record."""

    ticks: int
    tick_ns: int
    answered: int
    marks: int
    phase: Phase
    phase_since_ns: int
    step: int
    micro_step: int
    epoch: int
    issued: int
    group_seq: int
    group_seq_at_step: int
    exit_kind: ExitKind
    rank: int


@dataclass(frozen=True, slots=True)
class Record:
    """One reading of a page."""

    path: str
    version: int
    pid: int
    parent_pid: int
    host: str
    command: str
    start_ns: int
    start_unix_ns: int
    role: Role
    rank: int  # -1 = not known (yet)
    world_size: int
    local_rank: int
    worker_id: int  # of a loader worker, else -1
    stack_signal: int  # makes it append the stacks of all threads to `<pid>.stack`; 0 = not registered
    has_torch: bool
    is_probed: bool  # the calls of torch are marked
    is_library_stepped: bool  # allranks sets the steps, not the optimizer hooks
    is_in_process: bool  # installed by allranks.start(), no launcher
    has_stepped_aside: bool  # torch was not as expected: some marks are missing
    was_forked: bool
    ticks: int
    tick_ns: int  # old while the process lives: its GIL is held, or it is stopped
    asked: int
    answered: int
    marks: int  # another after every mark: compare it, do not count with it
    phase: Phase
    phase_since_ns: int
    line: str  # the user's line of the phase, "file:line function"; "" not known
    is_light: bool  # phase and line are not kept in this step: it is a quick one
    seen_phase: (
        Phase  # what the tick thread saw last in such a step, at most 0.4 s ago while the process runs
    )
    seen_line: str
    phase_ns: dict[Phase, int]  # cumulative, without the phase that still goes on; as old as Times
    step: int  # calls of Optimizer.step that ended (the library: optimizer steps)
    micro_step: int  # forwards since the last step
    epoch: int
    step_ends_ns: tuple[int, ...]  # the last 32 at most, oldest first
    step_ended: int  # the step that the last of them is of; where marks are light, others have ended since
    issued: int  # collectives of the user's calls
    issued_at_step: int  # the same, when the last step ended
    group_seq: int  # of the default group, DDP's collectives included; at most 0.1 s old, in quick steps as the next; -1 unknown
    group_seq_at_step: int  # the same, when step `group_seq_step` ended: of quick steps every 16th to 256th
    group_seq_step: int
    num_groups: int  # calls of new_group that returned
    collectives: tuple[Collective, ...]  # the last 32 at most, oldest first
    loader: Loader | None
    loader_before: Loader | None
    loader_worker_pids: tuple[int, ...]
    sample_count: int  # loader worker: samples of the batch being fetched; 0 = idle
    sample_task: int  # number of the batch
    sample_at: int  # which sample of them is being read, 0-based, -1 unknown
    samples: tuple[int, ...]  # their indices, 16 at most; -1 not an integer
    sample_ns: int  # since when
    last_gradient: str
    unused: str  # names of parameters that got no gradient in the last backward
    model: Model | None
    exception: LastWords | None
    thread_exception: LastWords | None
    exit: Exit
    destroyed_ns: int  # when destroy_process_group returned, 0 = not
    not_finite: NotFinite | None
    checks: tuple[Check, ...]  # the last 16 at most, oldest first
    times: Times | None
    timed: tuple[TimedStep, ...]  # the last 64 timed steps at most, oldest first

    @property
    def median_step_ns(self) -> int:
        """Median time between the last steps' ends; 0 with fewer than three steps."""
        ends = self.step_ends_ns
        if len(ends) < 3:
            return 0
        gaps = sorted(after - before for before, after in pairwise(ends))
        return gaps[len(gaps) // 2]

    @property
    def inside(self) -> Collective | None:
        """The last collective that has not come back, if any."""
        return next((c for c in reversed(self.collectives) if c.is_inside), None)
