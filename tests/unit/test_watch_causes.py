"""Does the evidence of real incidents, and made-up evidence of those that cannot be had here, lead to the right verdict?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.watch.causes import CAUSES
from allranks.watch.decide import decide
from allranks.watch.evidence import (
    Call,
    Evidence,
    Exit,
    Failure,
    FileLock,
    Loader,
    Node,
    Rank,
    Record,
    Slow,
    Socket,
    Stack,
    Words,
    from_json,
)
from allranks.watch.observed import Loop
from allranks.watch.verdict import Place, Verdict

FIXTURES = sorted((Path(__file__).parents[1] / "faults" / "fixtures").glob("*.json"))
LINE = Place("/home/ann/train.py", 27, "main", "loss.backward()")


def incident(path: Path) -> tuple[Evidence, dict[str, object]]:
    """The recorded evidence, and what was true."""
    kept = json.loads(path.read_text())
    return from_json(Evidence, kept["evidence"]), kept["expect"]


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_incident_when_decided_again_then_cause_and_culprit_are_named(path: Path) -> None:
    evidence, expect = incident(path)
    verdict = decide(evidence)
    assert verdict is not None
    assert (verdict.code, list(verdict.ranks)) == (expect["code"], expect["ranks"])
    assert any(f"rank {n}" in verdict.head() or "ranks" in verdict.head() for n in verdict.ranks)


@pytest.mark.parametrize("path", FIXTURES[::6], ids=lambda path: path.stem)
def test_evidence_when_it_goes_to_json_and_back_then_it_is_the_same(path: Path) -> None:
    evidence, _ = incident(path)
    assert from_json(Evidence, json.loads(json.dumps(evidence.to_json()))) == evidence


def test_causes_then_codes_and_names_are_each_used_once() -> None:
    modules = {c.CODE: c.NAME for c in CAUSES}
    assert len(modules) == len({c.NAME for c in CAUSES}) == len(set(map(id, CAUSES)))


# --- made-up evidence: two ranks on one host, rank 0 waits for gradients ---


def waiting(**changes: object) -> Rank:
    """Rank 0: in the gradient all-reduce of step 30 for 4 s."""
    record = Record(step=30, phase="backward", phase_s=4.0, median_step_s=0.01, group_seq=60, where=LINE)
    return Rank(0, "gpu-a", pid=100, state="S", wchan="futex_do_wait", record=replace(record, **changes))


def other(
    state: str = "S", wchan: str = "", code: str = "x = 1", file: str = "/home/ann/train.py", **record: object
) -> Rank:
    """Rank 1: at a line of its own."""
    place = Place(file, 30, "main", code)
    known = Record(
        **{"step": 30, "phase": "python", "phase_s": 4.0, "median_step_s": 0.01, "group_seq": 58, **record}
    )
    return Rank(
        1, "gpu-a", pid=101, state=state, wchan=wchan, record=known, stacks=(Stack((place,), is_main=True),)
    )


def verdict_on(*ranks: Rank, trigger: str = "waiting", **changes: object) -> Verdict | None:
    """What is said of them."""
    return decide(Evidence(world_size=2, ranks=ranks, trigger=trigger, cwd="/home/ann", **changes))


def code_of(*ranks: Rank, **changes: object) -> str:
    """The code of the verdict; empty if none."""
    found = verdict_on(*ranks, **changes)
    return found.code if found else ""


def ended(
    signal: int | None = None, code: int = 1, output: tuple[str, ...] = (), failure: Failure | None = None
) -> Rank:
    """Rank 1, which has ended."""
    record = Record(step=30, phase="python", where=LINE)
    return Rank(
        1, "gpu-a", pid=101, exit=Exit(code, signal, 5.0), record=record, output=output, failure=failure
    )


MADE_UP = {
    "AR222": other("D", "nfs_wait_bit_killable"),
    "AR226": other(wchan="hrtimer_nanosleep", code="time.sleep(9)"),
    "AR227": other(wchan="n_tty_read", code="input()"),
    "AR230": other(wchan="anon_pipe_write", code="file.write(data)"),
    "AR234": other(wchan="do_wait", code="subprocess.run(['tar'])"),
    "AR235": other(wchan="wait_woken tcp_recvmsg", code="sock.recv(10)"),
    "AR233": other(wchan="locks_lock_inode_wait", code="fcntl.flock(f, LOCK_EX)"),
    "AR236": other(),
}


@pytest.mark.parametrize("code", MADE_UP)
def test_absent_rank_when_its_stack_tells_what_it_does_then_that_is_the_cause(code: str) -> None:
    verdict = verdict_on(waiting(phase_s=6.0), MADE_UP[code])
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == (code, (1,))
    assert "rank 1" in verdict.head() and "rank 0 waits" in verdict.head()
    assert verdict.where[0].startswith("train.py:30 in main")


def test_absent_rank_when_its_node_did_not_answer_then_it_is_named_later_only() -> None:
    by_row = Rank(1, "gpu-b", 1, state="S", record=other().record, is_by_row=True)
    assert code_of(waiting(phase_s=6.0), by_row) == ""
    assert code_of(waiting(phase_s=11.0), by_row) == "AR236"


def test_killed_rank_when_the_kernel_counts_a_kill_then_memory_is_named() -> None:
    node = Node(0, "gpu-a", ranks=(0, 1), oom_kills=1, memory_limit_bytes=8_000_000_000)
    assert code_of(waiting(), ended(signal=9), trigger="exit", nodes=(node,)) == "AR202"


@pytest.mark.parametrize("is_seen", [True, False])
def test_killed_rank_when_its_line_is_only_one_that_was_seen_then_said_so(is_seen: bool) -> None:
    rank = ended(9)
    assert rank.record is not None
    verdict = verdict_on(
        waiting(), replace(rank, record=replace(rank.record, is_seen=is_seen)), trigger="ended"
    )
    assert verdict is not None
    assert any("up to 0.4 s before" in fact for fact in verdict.facts) is is_seen


def test_killed_rank_when_nothing_is_counted_then_memory_is_the_alternative() -> None:
    verdict = verdict_on(waiting(), ended(signal=9), trigger="exit")
    assert verdict is not None
    assert verdict.code == "AR201"
    assert [a.code for a in verdict.alternatives] == ["AR202"]


def test_bus_error_when_shared_memory_is_full_then_it_is_told() -> None:
    node = Node(0, "gpu-a", ranks=(0, 1), shm_size_bytes=64_000_000, shm_free_bytes=0)
    verdict = verdict_on(waiting(), ended(signal=7), trigger="exit", nodes=(node,))
    assert verdict is not None
    assert verdict.code == "AR204"
    assert any("/dev/shm: 0 MB free of 64 MB" in f for f in verdict.facts)


def test_loader_when_shared_memory_is_full_then_its_size_is_named() -> None:
    failure = Failure(
        "RuntimeError", "unable to allocate shared memory(shm) for file </torch_1>: No space left", (LINE,)
    )
    node = Node(0, "gpu-a", ranks=(0, 1), shm_size_bytes=1_000_000, shm_free_bytes=0)
    verdict = verdict_on(waiting(), ended(failure=failure), trigger="exit", nodes=(node,))
    assert verdict is not None
    assert verdict.code == "AR208"


def test_abort_when_no_collective_explains_it_then_what_the_library_said_is_told() -> None:
    output = ("terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc")
    verdict = verdict_on(waiting(), ended(signal=6, output=output), trigger="exit")
    assert verdict is not None
    assert verdict.code == "AR203"
    assert "std::bad_alloc" in verdict.head()


@pytest.mark.parametrize(("number", "code"), [(6, "AR203"), (11, "AR204")])
def test_rank_that_dies_after_its_script_had_ended_then_the_script_is_not_blamed(
    number: int, code: str
) -> None:
    rank = ended(signal=number)
    assert rank.record is not None
    verdict = verdict_on(
        waiting(), replace(rank, record=replace(rank.record, exit_kind="ended")), trigger="exit"
    )
    assert verdict is not None
    assert verdict.code == code and "after its script had ended" in verdict.head()
    assert "nothing your script does is at fault" in verdict.fix
    plain = verdict_on(waiting(), rank, trigger="exit")
    assert plain is not None
    assert "had ended" not in plain.head() and "at fault" not in plain.fix


def test_loader_when_the_connection_to_a_dead_worker_breaks_first_then_the_worker_is_named() -> None:
    inside = Place("/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 725, "__next__")
    failure = Failure("ConnectionResetError", "[Errno 104] Connection reset by peer", (inside, LINE))
    assert code_of(waiting(), ended(failure=failure), trigger="exit") == "AR207"
    assert code_of(waiting(), ended(failure=replace(failure, frames=(LINE,))), trigger="exit") != "AR207"


def test_static_graph_when_torch_says_so_then_it_is_the_cause() -> None:
    failure = Failure("RuntimeError", "Your training graph has changed in this iteration", (LINE,))
    assert code_of(waiting(), ended(failure=failure), trigger="exit") == "AR284"


def test_store_when_the_connection_is_refused_then_address_and_port_are_named() -> None:
    message = "The client socket has failed to connect to [gpu-a]:29500 (errno: 111 - Connection refused)."
    rank = ended(failure=Failure("DistNetworkError", message, (LINE,)))
    rank = replace(rank, record=Record(phase="init"))
    verdict = verdict_on(rank, trigger="exit")
    assert verdict is not None
    assert verdict.code == "AR307"
    assert "refused" in verdict.what


def test_timeout_when_only_victims_are_known_then_nobody_is_blamed_for_certain() -> None:
    lost = Failure("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", (LINE,))
    ranks = [replace(ended(failure=lost), rank=n) for n in (0, 1)]
    verdict = verdict_on(*ranks, trigger="exit")
    assert verdict is not None
    assert (verdict.code, verdict.confidence) == ("AR266", "possible")


def test_missing_rank_when_nothing_is_known_of_it_then_it_is_named() -> None:
    here = replace(waiting(), record=Record(phase="init", phase_s=12.0, where=LINE))
    verdict = verdict_on(here)
    assert verdict is not None
    assert (verdict.code, verdict.ranks) == ("AR300", (1,))
    assert "rank 1 is missing: only 1 of 2" in verdict.what


def test_lost_node_when_silent_or_closed_then_the_words_differ() -> None:
    nodes = (Node(0, "gpu-a", ranks=(0,)), Node(1, "gpu-b", ranks=(1,), is_lost=True, lost_s=1.2))
    assert code_of(waiting(), trigger="lost", nodes=nodes) == "AR320"
    closed = (nodes[0], replace(nodes[1], lost_why="its connection was closed"))
    assert code_of(waiting(), trigger="lost", nodes=closed) == "AR321"


def test_lost_hub_when_seen_from_another_node_then_it_is_its_own_view() -> None:
    nodes = (Node(0, "gpu-a", ranks=(0,), is_lost=True, lost_s=1.2), Node(1, "gpu-b", ranks=(1,)))
    verdict = verdict_on(replace(other(), node_rank=1), trigger="lost", nodes=nodes, here=1)
    assert verdict is not None
    assert verdict.code == "AR322"
    assert "gpu-b (node 1) alone" in verdict.seen_by


def test_path_when_data_is_not_acknowledged_then_the_network_is_named() -> None:
    dead = (Socket("10.0.0.2:4000", tx_queue=192, retransmits=4),)
    ranks = [replace(waiting(), rank=n, sockets=dead) for n in (0, 1)]
    nodes = (Node(0, "gpu-a", ranks=(0,)), Node(1, "gpu-b", ranks=(1,), address="10.0.0.2"))
    assert code_of(*ranks, trigger="network", nodes=nodes) == "AR323"
    fine = [replace(r, sockets=(Socket("10.0.0.2:4000"),)) for r in ranks]
    assert code_of(*fine, trigger="network", nodes=nodes) == ""


def test_stale_lock_when_its_owner_lives_then_it_is_not_stale() -> None:
    lock = FileLock("/tmp/lock", 60.0, 42, owner_alive=False)
    stack = (Stack((Place("/x/torch/utils/file_baton.py", 50, "wait"), LINE), is_main=True),)
    rank = replace(other(wchan="hrtimer_nanosleep"), stacks=stack, file_lock=lock)
    assert code_of(waiting(), rank) == "AR232"
    assert code_of(waiting(), replace(rank, file_lock=replace(lock, owner_alive=True))) == "AR233"


def test_frozen_rank_when_its_cgroup_is_then_it_is_stopped() -> None:
    verdict = verdict_on(waiting(), other("D", "__refrigerator"))
    assert verdict is not None
    assert verdict.code == "AR221"
    assert "frozen" in verdict.head()


# --- near misses: nothing may be said ---


def test_disk_when_a_rank_sleeps_in_the_kernel_for_a_moment_then_nothing_is_said() -> None:
    assert code_of(waiting(), other("D", "folio_wait_bit_common")) == ""


def test_leaving_rank_when_its_tick_is_old_then_the_gil_is_not_blamed() -> None:
    assert code_of(waiting(), replace(other("R", phase="exit", tick_s=3.0), main_cpu_share=0.2)) != "AR225"
    assert code_of(waiting(), replace(other("S", tick_s=3.0, wchan="futex_do_wait"))) == "AR225"


def test_interrupt_when_it_reaches_a_rank_first_then_it_is_no_failure() -> None:
    stopped = Record(step=30, exit_kind="exception", exception=Words("KeyboardInterrupt"))
    assert code_of(waiting(phase_s=0.2), replace(other(), record=stopped), trigger="dying") == ""


def test_silence_when_all_ranks_compute_then_nothing_is_said() -> None:
    ranks = [replace(other("R"), rank=n, main_cpu_share=0.9) for n in (0, 1)]
    assert code_of(*ranks, trigger="silence") == ""


def test_silence_when_all_ranks_sleep_in_evaluation_then_nothing_is_said() -> None:
    ranks = [replace(other(wchan="hrtimer_nanosleep", phase="evaluate"), rank=n) for n in (0, 1)]
    assert code_of(*ranks, trigger="silence") == ""


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate", "import", "build"])
def test_busy_rank_when_it_saves_or_evaluates_for_some_seconds_then_nothing_is_said(phase: str) -> None:
    assert code_of(waiting(), other("S", "hrtimer_nanosleep", phase=phase)) == ""


def test_computing_rank_when_it_moves_between_lines_then_it_is_given_time() -> None:
    rank = replace(other("R"), main_cpu_share=0.9, is_moving=True)
    assert code_of(waiting(), rank) == ""
    assert code_of(waiting(phase_s=12.0), rank) == "AR224"


def test_starved_rank_when_it_gets_no_core_then_it_counts_as_computing() -> None:
    rank = replace(other("R"), main_cpu_share=0.05, run_queue_share=0.9, is_moving=True)
    assert code_of(waiting(), rank) == ""


def test_starved_rank_when_it_does_not_come_for_long_then_the_script_is_not_blamed_for_certain() -> None:
    rank = replace(other("R"), main_cpu_share=0.05, run_queue_share=0.9, is_moving=True)
    verdict = verdict_on(waiting(phase_s=12.0), rank)
    assert verdict is not None
    assert (verdict.code, verdict.confidence) == ("AR224", "likely")
    assert "gets a core in 5% of its time only" in verdict.head()
    assert "the script need not be the cause" in verdict.fix


@pytest.mark.parametrize(
    "share, says", [(0.9, "waits 90% of its time for a processor core"), (0.35, "code of the script")]
)
def test_straggler_when_it_waits_for_a_core_then_only_if_that_explains_it(share: float, says: str) -> None:
    slow = Slow(1, 0.029, 0.007, 0.022, 0.030, "python", 4.0)
    rank = replace(other("R"), run_queue_share=share)
    verdict = verdict_on(waiting(), rank, trigger="slow", slow=slow)
    assert verdict is not None and verdict.code == "AR800"
    assert says in " ".join(verdict.facts)


def test_straggler_when_all_ranks_lack_a_core_then_only_a_large_difference_is_said() -> None:
    rank, victim = replace(other("R"), run_queue_share=0.6), replace(waiting(), run_queue_share=0.4)
    little, much = (
        Slow(1, 0.010 + excess, 0.010, excess, 0.030, "forward", 4.0) for excess in (0.008, 0.018)
    )
    assert verdict_on(victim, rank, trigger="slow", slow=little) is None
    assert verdict_on(victim, rank, trigger="slow", slow=much) is not None


def test_same_call_when_all_ranks_are_in_it_then_nothing_is_said() -> None:
    call = Call(
        "all_reduce", seq=7, shape=(64,), numel=64, dtype="float32", where=LINE, age_s=5.0, is_inside=True
    )
    record = Record(step=30, phase="collective", calls=(call,), group_seq=8, median_step_s=0.01)
    ranks = [Rank(n, "gpu-a", pid=n + 1, state="S", record=record) for n in (0, 1)]
    assert code_of(*ranks) == code_of(*ranks, trigger="mismatch") == ""


def test_loader_when_both_ranks_have_as_many_batches_then_it_is_not_uneven() -> None:
    loader = Loader(number=1, drawn=20, length=24, where=LINE)
    call = Call("barrier", seq=59, where=LINE, age_s=4.0, is_inside=True)
    inside = replace(other(loader=loader, phase="collective", calls=(call,)), stacks=())
    assert code_of(waiting(loader=loader), inside) == "AR250"
    over = replace(loader, length=21, drawn=21, is_exhausted=True)
    short = replace(inside, record=replace(inside.record, loader=over))
    assert code_of(waiting(loader=replace(loader, number=2, drawn=2)), short) == "AR251"


LOOP = Loop(Place("/home/ann/train.py", 20, "main", "for x in samples.split(32):"), last=26, line=24)


@pytest.mark.parametrize(
    ("line", "outer", "guard", "code"),
    [
        (30, (), None, "AR265"),  # past the loop
        (25, (), None, "AR250"),  # in it, in a branch that the other does not take
        (
            30,
            (Loop(Place("/home/ann/train.py", 80, "run"), last=99, line=90),),
            None,
            "AR250",
        ),  # an epoch ahead, perhaps
        (30, (), Place("/home/ann/train.py", 29, "main", "if rank == 1:"), "AR250"),
    ],
)
def test_barrier_when_it_is_after_the_loop_that_the_other_is_in_then_batches_are_blamed(
    line: int, outer: tuple[Loop, ...], guard: Place | None, code: str
) -> None:
    caller = Place("/home/ann/train.py", 90, "run", "main()")
    where = Place("/home/ann/train.py", line, "main")
    call = Call("barrier", 1, "default", seq=60, where=where, age_s=4.0, is_inside=True)

    def at(rank: Rank, number: int) -> Rank:
        torch = Place(
            "/opt/lib/python3.11/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward"
        )
        frames = torch, Place("/home/ann/train.py", number, "main"), caller
        return replace(rank, stacks=(Stack(frames, is_main=True),), loops=outer)

    trains = replace(at(waiting(), 24), loops=(LOOP, *outer))
    waits = at(other(phase="collective", calls=(call,), group_seq=60), line)
    assert code_of(trains, replace(waits, guard=guard)) == code
