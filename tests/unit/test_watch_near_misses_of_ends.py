"""Is a rank that ended, or left the others, told for what it did only, and not for what looks like it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from allranks.watch.decide import decide
from allranks.watch.evidence import Call, Evidence, Exit, Failure, Node, Rank, Record, Stack, Words, Worker
from allranks.watch.verdict import Place

LINE = Place("/home/ann/train.py", 27, "main", "loss.backward()")
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/"
READ = (Place(TORCH + "serialization.py", 1530, "load"), replace(LINE, code="torch.load(path)"))
WROTE = (Place(TORCH + "serialization.py", 1002, "save"), replace(LINE, code="torch.save(state, path)"))
BATCH = Place(TORCH + "utils/data/dataloader.py", 725, "__next__")
FETCH = Place(TORCH + "utils/data/_utils/fetch.py", 54, "fetch")
JOINING = (Place(TORCH + "distributed/rendezvous.py", 199, "_create_c10d_store"), LINE)


def alive(number: int = 0, *, state: str = "S", stack: tuple[Place, ...] = (), **record: Any) -> Rank:
    """In the gradient all-reduce of its backward, if nothing else is said."""
    known = {"step": 30, "phase": "backward", "phase_s": 4.0, "median_step_s": 0.01, "group_seq": 60} | record
    stacks = (Stack(stack, is_main=True),) if stack else ()
    host, wchan = "gpu-a", "futex_do_wait" if "phase" not in record else ""
    return Rank(
        number, host, pid=100 + number, state=state, wchan=wchan, record=Record(**known), stacks=stacks
    )


def ended(
    number: int = 1,
    *,
    code: int = 1,
    signal: int | None = None,
    at_s: float = 5.0,
    failure: Failure | None = None,
    output: tuple[str, ...] = (),
    notes: dict[str, str] | None = None,
    **record: Any,
) -> Rank:
    known = Record(**({"step": 30, "phase": "python", "where": LINE} | record))
    how = Exit(code, signal, at_s)
    return Rank(
        number,
        "gpu-a",
        pid=100 + number,
        exit=how,
        record=known,
        failure=failure,
        output=output,
        notes=notes or {},
    )


def raised(kind: str, message: str, frames: tuple[Place, ...] = (LINE,), **more: Any) -> Rank:
    return ended(failure=Failure(kind, message, frames), **more)


def told(*ranks: Rank, trigger: str = "exit", world_size: int = 2, **more: Any) -> str:
    verdict = decide(Evidence(world_size, ranks, trigger=trigger, cwd="/home/ann", **more))
    return verdict.code if verdict is not None else ""


BAD_INDEX = replace(
    raised("IndexError", "list index out of range", at_s=4.0), rank=0, pid=100
)  # the first that failed


# --- ended ---


@pytest.mark.parametrize(("number", "code"), [(6, "AR203"), (11, "AR204"), (7, "AR204")])
def test_signal_when_another_rank_failed_first_or_it_is_no_crash_then_no_crash_is_told(
    number: int, code: str
) -> None:
    crashed = ended(code=-number, signal=number)
    assert told(alive(), crashed) == code
    assert told(BAD_INDEX, crashed) == "AR200"
    assert told(ended(0, at_s=4.0, exit_kind="hard_exit"), crashed) == "AR205"
    assert told(alive(), ended(code=-15, signal=15)) == "AR201"
    assert told(alive(), replace(crashed, exit=Exit(-number, number, 5.0, by_us=True))) == ""


def test_abort_when_gloo_lost_a_peer_then_that_peer_is_told() -> None:
    output = (
        "terminate called after throwing an instance of 'gloo::IoException'",
        "  what():  Connection closed by peer",
    )
    lost = ended(signal=6, code=-6, output=output)
    assert told(alive(), lost) == "AR266"
    assert told(replace(BAD_INDEX, exit=Exit(1, None, 6.0)), lost) == "AR200"  # though it was seen later
    assert (
        told(replace(BAD_INDEX, exit=Exit(1, None, 6.0)), replace(lost, output=("std::bad_alloc",)))
        == "AR203"
    )


def test_bus_error_when_it_is_a_loader_workers_then_the_rank_has_not_crashed() -> None:
    message = "DataLoader worker (pid 8343) is killed by signal: Bus error."
    assert told(alive(), raised("RuntimeError", message, (BATCH, LINE))) == "AR207"
    assert told(alive(), ended(signal=7, code=-7)) == "AR204"


def test_exit_when_nobody_waits_or_an_error_came_first_then_it_is_not_told() -> None:
    """`sys.exit(main())` is how many scripts end."""
    left = ended(code=0, phase="exit", exit_kind="system_exit")
    assert told(alive(), left) == "AR205"
    assert told(alive(phase="evaluate", state="R"), left) == ""
    assert told(replace(left, rank=0), left) == ""
    late = ended(phase="exit", exit_kind="system_exit", exit_code=1)
    assert told(BAD_INDEX, late) == "AR200"
    stopped = ended(0, code=130, at_s=4.0, exit_kind="exception", exception=Words("KeyboardInterrupt"))
    assert told(stopped, late) == ""


def in_pair(*members: int) -> Call:
    text = ",".join(map(str, members))
    return Call("all_reduce", 1, "pair", text, seq=3, where=LINE, age_s=4.0, is_inside=True)


@pytest.mark.parametrize(
    ("gone", "code"),
    [
        (ended(1, code=0, phase="exit", exit_kind="ended"), "AR206"),
        (alive(1, phase="python", is_destroyed=True), "AR262"),
        (ended(1, code=0, phase="exit", exit_kind="system_exit"), "AR205"),
    ],
)
def test_rank_that_left_when_the_others_do_not_need_it_then_it_is_not_told(gone: Rank, code: str) -> None:
    call = in_pair(0, 2)
    first = alive(0, phase="collective", calls=(call,))
    sleeps = replace(
        alive(2, stack=(replace(LINE, code="time.sleep(9)"),), phase="python"), wchan="hrtimer_nanosleep"
    )
    all_three = replace(first, record=replace(first.record, calls=(in_pair(0, 1, 2),)))  # type: ignore[type-var]
    assert told(first, gone, sleeps, trigger="waiting", world_size=3) == "AR226"
    assert told(all_three, gone, sleeps, trigger="waiting", world_size=3) == code
    assert told(alive(0, phase="evaluate", state="R"), gone, trigger="waiting") == ""


def test_destroyed_when_it_is_a_group_of_its_own_then_not_what_the_others_wait_for() -> None:
    call = Call("destroy_process_group", 3, where=LINE)
    sleeps = alive(1, stack=(replace(LINE, code="time.sleep(9)"),), phase="python", calls=(call,))
    sleeps = replace(sleeps, wchan="hrtimer_nanosleep")
    assert told(alive(), sleeps, trigger="waiting") == "AR226"
    world = replace(sleeps, record=replace(sleeps.record, is_destroyed=True))  # type: ignore[type-var]
    assert told(alive(), world, trigger="waiting") == "AR262"


# --- its words are like those of a known error ---


def test_worker_when_the_data_set_of_the_main_process_raises_then_no_worker_died() -> None:
    """num_workers=0: the loader's lines are above those of the data set."""
    library = Place("/opt/venv/lib/python3.11/site-packages/PIL/Image.py", 3431, "open")
    queue = Place("/usr/lib/python3.11/multiprocessing/connection.py", 634, "SocketClient")
    own = Place("/home/ann/data.py", 12, "__getitem__", "open(path)")
    sampler = Place("/home/ann/data.py", 40, "__iter__", "open(index)")
    error = "FileNotFoundError", "[Errno 2] No such file or directory"
    assert told(alive(), raised(*error, (queue, BATCH, LINE))) == "AR207"
    for inner in ((own, FETCH), (library, FETCH), (sampler,)):
        assert told(alive(), raised(*error, (*inner, BATCH, LINE))) == "AR200"


def test_worker_when_some_live_or_no_batch_is_waited_for_then_none_is_said_to_have_died() -> None:
    dead, lives = Worker(201, 0, "Z", is_loader=True), Worker(202, 1, "S", is_loader=True)
    waits = replace(alive(1, stack=(BATCH, LINE), phase="data"), workers=(dead,))
    assert told(alive(), waits, trigger="waiting") == "AR207"
    for workers in ((dead, lives), (replace(dead, is_loader=False, command="tar"),)):
        assert told(alive(), replace(waits, workers=workers), trigger="waiting") != "AR207"
    over = replace(waits, record=replace(waits.record, phase="python"))  # type: ignore[type-var]
    assert told(alive(), over, trigger="waiting") != "AR207"


@pytest.mark.parametrize(
    ("kind", "message", "above", "output"),
    [
        ("OSError", "[Errno 28] No space left on device: '/scratch/torch_runs/last.pt'", (), ()),
        (
            "OSError",
            "[Errno 28] No space left on device",
            ('  File "/home/ann/torch_lab/train.py", line 3',),
            (),
        ),
        (
            "OutOfResources",
            "out of resource: shared memory, Required: 114688, Hardware limit: 101376",
            (),
            (),
        ),
        ("KeyError", "'lr'", (), ("cache: insufficient shared memory, the disk is used",)),
    ],
)
def test_shared_memory_when_a_disk_or_a_chip_is_full_then_not_dev_shm(
    kind: str, message: str, above: tuple[str, ...], output: tuple[str, ...]
) -> None:
    full = "unable to write to file </torch_12_345_0>: No space left on device (28)"
    nodes = (Node(0, "gpu-a", ranks=(0, 1), shm_size_bytes=64_000_000, shm_free_bytes=60_000_000),)
    assert told(alive(), raised("RuntimeError", full), nodes=nodes) == "AR208"
    failure = Failure(kind, message, (LINE,), text=(*above, f"{kind}: {message}"))
    assert told(alive(), ended(failure=failure, output=output), nodes=nodes) == "AR200"


@pytest.mark.parametrize(
    "message",
    [
        "[Errno 23] Too many open files in system: 'a.bin'",  # the host's limit: no `ulimit -n` helps
        "[Errno 24] inotify instance limit reached",
        "[Errno 12] Cannot allocate memory",
    ],
)
def test_open_files_when_another_limit_is_reached_then_not_that_of_the_rank(message: str) -> None:
    assert told(alive(), raised("OSError", "[Errno 24] Too many open files: 'a.bin'")) == "AR209"
    assert told(alive(), raised("OSError", message)) == "AR200"


def test_missing_file_when_all_ranks_miss_it_or_another_error_came_first_then_no_rank_was_too_early() -> None:
    missing = raised("FileNotFoundError", "No such file or directory: '/d/a'", notes={"missing": "/d/a"})
    assert told(alive(), missing) == "AR210"
    assert told(replace(missing, rank=0), missing) == "AR200"
    assert told(BAD_INDEX, missing) == "AR200"
    late = replace(missing, notes={"missing": "/d/a", "exists": "moments"})
    assert told(replace(late, rank=0), late) == "AR210"


def keeps(rank: Rank, *files: str, host: str = "gpu-a") -> Rank:
    """It has saved and loaded these files: 'saved /d/last.pt'."""
    line = "/home/ann/train.py:20 main"
    pairs = [f.split() for f in files]
    noted = tuple({"kind": kind, "path": path, "line": line} for kind, path in pairs)
    assert rank.record is not None
    return replace(rank, host=host, record=replace(rank.record, noted=noted))


@pytest.mark.parametrize(
    ("kind", "message", "frames"),
    [
        ("RuntimeError", "PytorchStreamReader failed reading zip archive: failed finding directory", READ),
        ("UnpicklingError", "invalid load key, '\\x00'.", READ),
        ("EOFError", "", READ),
        ("RuntimeError", "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0", WROTE),
    ],
)
def test_damaged_file_when_several_ranks_write_it_then_they_are_told(
    kind: str, message: str, frames: tuple[Place, ...]
) -> None:
    reader = keeps(raised(kind, message, frames), "saved /d/best.pt", "loaded /d/best.pt")
    verdict = decide(Evidence(2, (keeps(alive(), "saved /d/best.pt"), reader), trigger="exit"))
    assert verdict is not None and (verdict.code, verdict.ranks) == ("AR211", (0, 1))
    assert "ranks 0 and 1 on gpu-a write one file, /d/best.pt, and rank 1 cannot read it" in verdict.what
    assert "/home/ann/train.py:20" in verdict.where[0]


def test_damaged_file_when_one_rank_writes_it_or_it_is_another_then_the_writers_are_not_told() -> None:
    error = "RuntimeError", "PytorchStreamReader failed reading zip archive: not a ZIP archive"
    both, bad = ("saved /d/best.pt", "loaded /d/best.pt"), raised(*error, READ)
    assert told(keeps(alive(), *both), keeps(bad, *both)) == "AR211"
    assert told(keeps(alive(), *both), keeps(bad, "loaded /d/best.pt")) == "AR200"
    assert told(keeps(alive(), "saved /d/0.pt"), keeps(bad, "saved /d/1.pt", "loaded /d/1.pt")) == "AR200"
    assert told(keeps(BAD_INDEX, *both), keeps(bad, *both)) == "AR200"
    # a download that was cut off, while the checkpoints of the job are sound
    assert told(keeps(alive(), "saved /d/best.pt"), keeps(bad, "saved /d/best.pt", "loaded /x.pt")) == "AR200"
    unpickled = raised(
        "UnpicklingError", "pickle data was truncated", (replace(LINE, code="pickle.load(f)"),)
    )
    assert told(keeps(alive(), *both), keeps(unpickled, *both)) == "AR200"
    # of the same name on two hosts, each on its own disk
    here = ("saved /tmp/best.pt", "loaded /tmp/best.pt")
    assert told(keeps(alive(), *here), keeps(bad, *here)) == "AR211"
    assert told(keeps(alive(), *here), keeps(bad, *here, host="gpu-b")) == "AR200"


def test_ready_twice_when_another_error_of_ddp_or_of_an_earlier_rank_then_not_told() -> None:
    twice = "Expected to mark a variable ready only once. This error is caused by ..."
    assert told(alive(), raised("RuntimeError", twice)) == "AR283"
    assert told(BAD_INDEX, raised("RuntimeError", twice)) == "AR200"
    assert (
        told(alive(), raised("RuntimeError", "Trying to backward through the graph a second time")) == "AR200"
    )
    never = "Expected to have finished reduction in the prior iteration before starting a new one."
    assert told(alive(), raised("RuntimeError", never)) == "AR281"


# --- the network ---


def test_communication_when_another_ranks_error_explains_it_then_that_is_told() -> None:
    lost = "RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:15783"
    inside = (Place(TORCH + "distributed/distributed_c10d.py", 3252, "all_reduce"), LINE)
    assert told(replace(raised(*lost, inside), rank=0), raised(*lost, inside)) == "AR266"
    late = replace(BAD_INDEX, exit=Exit(1, None, 6.0))
    assert told(late, raised(*lost, inside)) == "AR200"
    assert told(replace(ended(0, code=-9, signal=9), host="gpu-a"), raised(*lost, inside)) == "AR201"


def test_communication_when_a_download_is_cut_off_then_it_is_the_ranks_own_error() -> None:
    message = "('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))"
    library = Place("/opt/venv/lib/python3.11/site-packages/requests/adapters.py", 682, "send")
    get = replace(LINE, code="requests.get(url)")
    assert told(alive(), raised("ConnectionError", message, (library, get))) == "AR200"
    assert (
        told(alive(), raised("ConnectionResetError", "[Errno 104] Connection reset by peer", (get,)))
        == "AR200"
    )


@pytest.mark.parametrize("phase", ["init", "build"])
def test_address_when_a_peer_on_loopback_failed_first_then_the_address_is_right(phase: str) -> None:
    away = "connectFullMesh failed with [pair.cc:144] no error, remote=[127.0.1.1]:44157"
    assert told(alive(), raised("RuntimeError", away, JOINING, phase=phase)) == "AR304"
    closed = "[pair.cc:553] Connection closed by peer [127.0.0.1]:15783"
    for message in (away, closed):
        victim = raised("RuntimeError", message, JOINING, phase=phase)
        assert told(BAD_INDEX, victim) == "AR200"
        assert told(replace(BAD_INDEX, exit=Exit(1, None, 6.0)), victim) == "AR200"
    assert told(alive(), raised("RuntimeError", closed, JOINING, phase=phase)) == "AR266"


def test_interface_when_a_name_of_something_else_is_not_found_then_not_told() -> None:
    assert (
        told(alive(), raised("RuntimeError", "ifa != nullptr. Unable to find address for: eth9")) == "AR304"
    )
    assert told(alive(), raised("ValueError", "Unable to find interface class for backend 'mine'")) == "AR200"


def test_port_when_it_is_one_of_the_scripts_own_then_the_jobs_is_not_called_taken() -> None:
    job = "The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE"
    assert told(alive(), raised("DistNetworkError", job, JOINING, phase="init")) == "AR306"
    assert told(alive(), raised("RuntimeError", job, JOINING, phase="init")) == "AR306"
    serve = Place("/usr/lib/python3.11/socketserver.py", 472, "server_bind")
    own = "OSError", "[Errno 98] Address already in use"
    verdict = decide(Evidence(2, (alive(), raised(*own, (serve, LINE))), trigger="exit"))
    assert verdict is not None and verdict.code == "AR200"
    assert "LOCAL_RANK" in verdict.fix


# --- alive ---


PDB = (
    Place("/usr/lib/python3.11/cmd.py", 126, "cmdloop"),
    Place("/usr/lib/python3.11/pdb.py", 1, "interaction"),
)
DEBUGPY = Place("/opt/venv/lib/python3.11/site-packages/debugpy/server/cli.py", 310, "run_file")


def test_debugger_when_the_script_only_runs_under_one_then_no_breakpoint_is_told() -> None:
    sleep = replace(LINE, code="time.sleep(9)")

    def at(*stack: Place) -> str:
        return told(
            alive(),
            replace(alive(1, stack=stack, phase="python"), wchan="hrtimer_nanosleep"),
            trigger="waiting",
        )

    assert at(*PDB, LINE) == at(*PDB, LINE, DEBUGPY) == "AR220"
    assert at(sleep, DEBUGPY) == at(sleep, *PDB[1:]) == "AR226"
    assert at(replace(sleep, file="/home/ann/cmd.py")) == "AR226"


def test_rank_that_does_not_come_when_all_do_the_same_or_it_has_just_begun_then_nothing_is_said() -> None:
    def idle(number: int, **record: Any) -> Rank:
        return alive(number, stack=(replace(LINE, code="x = 1"),), **({"phase": "python"} | record))

    assert told(alive(), idle(1), trigger="waiting") == "AR236"
    assert told(idle(0), idle(1), trigger="waiting") == ""
    assert told(alive(phase_s=0.5), idle(1, phase_s=0.5), trigger="waiting") == ""
    assert told(alive(median_step_s=0.0), idle(1, phase="build"), trigger="waiting") == ""


def test_thread_when_its_calls_are_in_a_group_of_its_own_then_it_is_in_no_race() -> None:
    """As the advice is: a heartbeat, an asynchronous checkpoint."""
    call = Call("all_reduce", 1, "default", seq=16, shape=(4,), numel=4, dtype="float32", where=LINE)
    beat = replace(call, where=replace(LINE, line=40), thread="beat", shape=(1,), numel=1, number=2)
    apart = replace(beat, group="beats", members="0,1", seq=3)

    def code(side: Call, *mains: Call, **differs: Any) -> str:
        sides = side, replace(side, **differs)
        ranks = [alive(n, phase="python", group_seq=17, calls=(c, sides[n])) for n, c in enumerate(mains)]
        return told(*ranks, trigger="mismatch")

    other = replace(call, shape=(5,), numel=5)
    assert code(replace(beat, seq=17), call, other) == "AR261"
    assert code(apart, call, other) == "AR253"
    assert code(apart, call, call) == ""
    assert code(apart, call, call, numel=2, shape=(2,)) == "AR253"
    assert code(replace(beat, op="isend", seq=17), call, other) == "AR253"
