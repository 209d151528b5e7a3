"""What does a thread that does not come to the collective do instead?

Read from its Python frames, the text of the user's line, the kernel function it sleeps in (wchan), and its processor time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

from allranks.watch.evidence import Rank, Stack, Worker
from allranks.watch.stacks import is_inside, is_library, main_stack, user_frames, user_place
from allranks.watch.verdict import Place

_LOCK_CODE = re.compile(r"\.(acquire|join|wait|get|put|result)\(|^\s*(async )?with\b|\block\b", re.I)
_SLEEP_CODE = re.compile(r"\bsleep\(")
_INPUT_CODE = re.compile(r"\binput\(|\bstdin\b|getpass\(")
_WRITE_CODE = re.compile(
    r"\b(torch\.)?save\w*\(|\.write\w*\(|\bdump\(|\bsavez?\(|fsync\(|copy(file|tree|2)?\(|\bto_(csv|parquet)\("
)
_FETCH_CODE = re.compile(
    r"download|urlopen|urlretrieve|requests\.|snapshot_download|hf_hub|load_dataset|from_pretrained|tokeniz|preprocess|prepare",
    re.I,
)
_NO_CALL = re.compile(r"\b(while|if|elif|return|and|or|not|in|is|lambda|yield|await|print)\s*\(")
_CALL = re.compile(r"\w\s*\(")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/ipdb/__main__.py", "/pudb/debugger.py", "/debugpy/", "/cmd.py")
_RECEIVE_CODE = re.compile(r"\.(recv|recv_into|recvfrom|recvmsg)\(")
_SOCKETS = (
    "/socket.py",
    "/ssl.py",
    "/http/client.py",
    "/urllib/request.py",
    "/urllib3/connection.py",
    "/httpx/_client.py",
)


@dataclass(frozen=True, slots=True)
class Activity:
    """What one thread does."""

    kind: str
    """debugger input lock sleep subprocess socket build_lock file_lock write loader loop c_call idle unknown."""
    words: str
    """After 'rank 1 ': 'sleeps', 'waits for a lock'."""
    where: Place | None
    is_busy: bool = False
    """It uses the processor or moves data: it may well come by itself."""


def activity(rank: Rank) -> Activity:
    """What the rank's main thread does."""
    stack = main_stack(rank.stacks)
    place = user_place(stack.frames) if stack else None
    if place is None and rank.record is not None:
        place = rank.record.where
    # On a loaded host a rank that computes gets little processor time: then it waits for a core, which counts as well.
    cpu = (rank.main_cpu_share or rank.cpu_share) + rank.run_queue_share
    found = of_stack(stack, place, rank.wchan, rank.state, cpu)
    if (
        rank.record is not None
        and rank.record.tick_s > _late_tick_s(rank)
        and rank.record.phase != "exit"  # the thread that ticks ends with the script
        and rank.record.exit_kind == ""
        and rank.state in ("R", "S")
        and found.kind != "debugger"
    ):
        return Activity("gil", "holds Python's lock (GIL) in C code", place, is_busy=cpu > 0.3)
    return found


def _late_tick_s(rank: Rank) -> float:
    """How long no tick means that the GIL is held: a starved process ticks late, too."""
    if rank.host_load > 4.0:
        return 5.0
    return 1.0 if rank.run_queue_share < 0.5 else 1.8


def worker_activity(worker: Worker) -> Activity:
    """What a loader worker's main thread does."""
    stack = main_stack(worker.stacks)
    place = user_place(stack.frames) if stack else None
    return of_stack(stack, place, worker.wchan, worker.state, worker.cpu_share)


def of_stack(stack: Stack | None, place: Place | None, wchan: str, state: str, cpu: float) -> Activity:
    """What a thread with this stack does; `place` is the user's line in it."""
    frames = stack.frames if stack else ()
    code = place.code if place else ""
    top_is_user = bool(frames) and user_frames(frames[:1]) != ()
    # Above the user's line: below it are those of a debugger that only runs the script (python -m pdb, -m debugpy).
    inner = tuple(takewhile(lambda f: f.file.startswith("<") or is_library(f.file), frames))
    if any(d in f.file for d in _DEBUGGERS for f in inner):
        return Activity("debugger", "is in a debugger", place)
    if is_inside(frames, "/file_baton.py") or is_inside(frames, "/filelock/_api.py"):
        return Activity("build_lock", "waits for a lock file", place)
    if is_inside(frames, "importlib._bootstrap>", "acquire") or is_inside(
        frames[:2], "_bootstrap>", "acquire"
    ):
        return Activity("lock", "waits for an import's lock", place)
    if cpu > 0.5 and wchan in ("", "0"):
        return Activity("loop", "computes", place, is_busy=True)
    if "tty_read" in wchan or (
        _INPUT_CODE.search(code) and re.search(r"pipe_read|wait_woken|poll|select", wchan)
    ):
        return Activity("input", "waits for input", place)
    if "nanosleep" in wchan or (_SLEEP_CODE.search(code) and not wchan.startswith("futex")):
        return Activity("sleep", "sleeps", place)
    if (
        is_inside(frames, "/subprocess.py", "wait", "_wait", "_try_wait", "communicate", "_communicate")
        or wchan == "do_wait"
    ):
        return Activity("subprocess", "waits for a program it started", place)
    if is_inside(frames, "utils/data/dataloader.py"):
        return Activity("loader", "waits for its data loader", place)
    if (
        any(is_inside(frames, s) for s in _SOCKETS)
        or re.search(r"tcp_|sk_wait|inet_csk|unix_stream_read|skb_wait", wchan)
        or (wchan == "wait_woken" and _RECEIVE_CODE.search(code))
    ):
        return Activity("socket", "waits for the network", place, is_busy=bool(_FETCH_CODE.search(code)))
    if state == "D" or is_inside(frames, "torch/serialization.py", "save", "_save", "_legacy_save"):
        return Activity(
            "write" if _is_writing(frames, code) else "disk",
            "waits for the disk",
            place,
            is_busy=state == "R",
        )
    if (
        _WRITE_CODE.search(code)
        and not _LOCK_CODE.search(code)
        and top_is_user
        and not wchan.startswith("futex")
    ):
        return Activity("write", "writes a file", place, is_busy=state == "R" or cpu > 0.1)
    if "locks_lock" in wchan or "flock" in wchan:
        return Activity("file_lock", "waits for a file's lock", place)
    if wchan.startswith("futex") and (_is_lock(frames) or (top_is_user and _LOCK_CODE.search(code))):
        return Activity("lock", "waits for a lock", place)
    if "pipe_read" in wchan or "poll" in wchan or "select" in wchan:
        return Activity("pipe", "waits for another process", place)
    if cpu > 0.3:
        return Activity("loop", "computes", place, is_busy=True)
    if wchan.startswith("futex") and frames:
        return Activity("lock", "waits for a lock", place)
    return Activity("unknown", "does not go on", place, is_busy=state == "R")


def _is_writing(frames: tuple[Place, ...], code: str) -> bool:
    return bool(_WRITE_CODE.search(code)) or is_inside(frames, "torch/serialization.py")


def _is_lock(frames: tuple[Place, ...]) -> bool:
    names = ("acquire", "wait", "join", "_wait_for_tstate_lock", "__enter__", "result", "get", "put")
    return is_inside(frames[:3], "/threading.py", *names) or is_inside(frames[:3], "/queue.py", *names)


def calls_something(place: Place | None) -> bool:
    """Whether the line calls something: what that takes is work, perhaps, where a loop that calls nothing is only a loop."""
    return place is not None and bool(_CALL.search(_NO_CALL.sub("", place.code)))


def waiting_threads(rank: Rank) -> tuple[tuple[Stack, Place], ...]:
    """Threads of the rank that stand at a line of the user's that takes a lock, main thread first."""
    found: list[tuple[Stack, Place]] = []
    for stack in sorted(rank.stacks, key=lambda s: not s.is_main):
        place = user_place(stack.frames)
        top = stack.frames[:3]
        if place is None or not stack.frames:
            continue
        if _is_lock(tuple(top)) or (
            stack.frames[0] == place and _LOCK_CODE.search(place.code) and not _SLEEP_CODE.search(place.code)
        ):
            found.append((stack, place))
    return tuple(found)
