"""Is it told what happens at each address of the meeting point, and what the kernel's log and a spawning script say?"""

from __future__ import annotations

import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.core.job import RankExit
from allranks.watch import kernel_log, spawned, store
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Node, Rank, Record

LOG = (
    "3,900,12950804046,-;Memory cgroup out of memory: Killed process 32180 (python3.11) total-vm:1095408kB, "
    "anon-rss:339136kB, file-rss:95792kB, shmem-rss:0kB, UID:0 pgtables:1220kB oom_score_adj:0\n"
    "6,901,12950804047,-;oom_reaper: reaped process 32180 (python3.11), now anon-rss:0kB\n"
)


def test_look_when_one_address_of_a_name_listens_then_each_is_told(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        two = [
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0] for host in ("127.0.0.2", "127.0.0.1")
        ]
        monkeypatch.setattr(store.socket, "getaddrinfo", lambda *_, **__: two)
        assert store.look(f"node-a:{port}") == "127.0.0.2 refuses, 127.0.0.1 listens"
    assert store.look("node-a:66660") == "no address"


def test_look_when_a_name_is_not_resolved_in_time_then_said_and_tried_once_for_all_ranks(monkeypatch) -> None:
    asked, answered = [], threading.Event()

    def hangs(*where: object, **_: object) -> list[tuple]:
        asked.append(where[0])
        answered.wait(60)
        raise OSError

    monkeypatch.setattr(store.socket, "getaddrinfo", hangs)
    monkeypatch.setattr(store, "WAIT_S", 0.05)
    store.begin([[{"kind": "meets", "at": "node-b:29500"}]] * 2)
    seen = [store.with_store(waiting(n, "node-b:29500")).notes["store"] for n in range(3)]
    assert set(seen) == {"the name node-b was not resolved in 0.05 s"}
    assert asked == ["node-b"]
    answered.set()
    store._looks.pop("node-b:29500")._thread.join()


def waiting(rank: int, at: str, **notes: str) -> Rank:
    noted = ({"kind": "meets", "at": at, "torch": "2.13.0"},)
    record = Record(phase="init", phase_s=4.0, noted=noted)
    return Rank(rank, "gpu-a", pid=100 + rank, state="S", record=record, notes=notes)


def test_store_when_a_rank_goes_to_another_port_then_it_is_named() -> None:
    ranks = (
        waiting(0, "10.0.0.1:29500"),
        waiting(1, "10.0.0.1:29501", store="::1 refuses, 10.0.0.1 listens"),
    )
    verdict = decide(Evidence(2, ranks, (Node(0, "gpu-a"),), trigger="network"))
    assert verdict is not None and (verdict.code, verdict.ranks) == ("AR307", (1,))
    assert any("several addresses" in fact for fact in verdict.facts)


@pytest.mark.parametrize(("waited_s", "code"), [(4.0, None), (9.0, "AR307")])
def test_store_when_its_name_takes_long_then_it_is_named_later_only(
    waited_s: float, code: str | None
) -> None:
    one = waiting(1, "node-b:29500", store="the name node-b was not resolved in 0.5 s")
    assert one.record is not None
    one = replace(one, record=replace(one.record, phase_s=waited_s))
    verdict = decide(Evidence(2, (one,), (Node(0, "gpu-a"),), trigger="network"))
    assert (verdict.code if verdict and verdict.code == "AR307" else None) == code


@pytest.mark.parametrize(
    ("waited_s", "state", "code"),
    [(4.0, "S", None), (12.0, "S", "AR307"), (12.0, "R", None), (70.0, "R", "AR307")],
)
def test_store_when_rank_0_has_come_but_not_opened_it_yet_then_it_is_given_time(
    waited_s: float, state: str, code: str | None
) -> None:
    others = [waiting(n, "127.0.0.1:29500", store="127.0.0.1 refuses") for n in range(3)]
    first = others[0]
    assert first.record is not None
    first = replace(first, state=state, record=replace(first.record, phase_s=waited_s))
    verdict = decide(Evidence(3, (first, *others[1:]), (Node(0, "gpu-a"),), trigger="network"))
    assert (verdict.code if verdict else None) == code
    gone = decide(
        Evidence(3, tuple(others[1:]), (Node(0, "gpu-a"),), trigger="network")
    )  # it is not there at all
    assert gone is not None and gone.code == "AR307"


def test_store_when_all_go_to_one_place_that_listens_then_nothing_is_said() -> None:
    ranks = tuple(waiting(n, "10.0.0.1:29500", store="10.0.0.1 listens") for n in range(2))
    assert decide(Evidence(2, ranks, (Node(0, "gpu-a"),), trigger="network")) is None


def test_versions_when_they_differ_and_ranks_stand_in_setting_up_then_it_is_likely() -> None:
    one = waiting(0, "10.0.0.1:29500")
    assert one.record is not None
    other = replace(one.record, noted=({"kind": "meets", "at": "10.0.0.1:29500", "torch": "2.6.0"},))
    ranks = (one, waiting(1, "10.0.0.1:29500"), replace(waiting(2, ""), record=other))
    verdict = decide(Evidence(3, ranks, (Node(0, "gpu-a"),), trigger="network"))
    assert verdict is not None and (verdict.code, verdict.ranks) == ("AR308", (2,))


def test_log_when_the_kernel_killed_for_memory_then_process_and_size_are_read() -> None:
    assert kernel_log.parse(LOG) == {32180: "Memory cgroup out of memory, it held 0.34 GB"}


def test_exit_when_a_spawning_script_says_who_was_killed_then_that_rank_is_the_one(tmp_path: Path) -> None:
    said = ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL",)
    ended = RankExit(0, "gpu-a", 0, 1, None, 3.0, said, pid=1)
    gone = 2**22 + 7  # no process has this number
    found = spawned.at_exit(ended, [Rank(n, "gpu-a", pid=gone + n) for n in range(2)], tmp_path)
    assert found[1].exit is not None and found[1].exit.signal == signal.SIGKILL
    assert found[0].exit is not None and found[0].exit.by_us
    verdict = decide(Evidence(2, tuple(found.values()), (Node(0, "gpu-a"),), trigger="exit"))
    assert verdict is not None and (verdict.code, verdict.ranks) == ("AR201", (1,))
