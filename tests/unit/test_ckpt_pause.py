"""Do all ranks pause after the same update, whoever was asked, and does nobody wait when nobody asks?"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from allranks.core.errors import CommError
from allranks.train.pausing import Decision, Pause

POLL_S = 0.002


def run_threads(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Threads as ranks; each rank's result."""
    results: list[Any] = [None] * world_size

    def call(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - told to the test
            results[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


class Training:
    """Ranks that do updates: none finishes one that another has not begun, as an all-reduce would have it."""

    def __init__(self, world_size: int, *, ask: dict[int, Callable[[Pause], None]], seed: int = 0) -> None:
        self.world_size, self.ask = world_size, ask
        self.barrier = threading.Barrier(world_size)
        self.store = HashStore()
        self.random = random.Random(seed)

    def run(self, rank: int, num_updates: int = 4000) -> list[tuple[int, Decision]]:
        pause = Pause(rank=rank, world_size=self.world_size, store=self.store, poll_s=POLL_S)
        pause.start()
        decisions = []
        try:
            for update in range(1, num_updates + 1):
                if update == 5 and rank in self.ask:
                    self.ask[rank](pause)
                self.barrier.wait(20)
                if self.random.random() < 0.02:
                    time.sleep(0.001)
                decision = pause.after_update()
                if decision is not None:
                    decisions.append((update, decision))
                    if decision.stop:
                        break
        finally:
            pause.close()
        return decisions


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_ranks_when_any_one_is_asked_to_stop_stop_after_the_same_update(asked: int) -> None:
    training = Training(3, ask={asked: lambda p: p.ask_to_stop("SIGTERM at rank x")})
    results = run_threads(3, training.run)
    assert results[0] == results[1] == results[2]
    ((update, decision),) = results[0]
    assert update > 5 and decision == Decision(stop="SIGTERM at rank x", save=False)


def test_ranks_when_asked_to_save_and_later_to_stop_do_both_alike() -> None:
    def ask(pause: Pause) -> None:
        pause.ask_to_save()
        threading.Timer(0.1, lambda: pause.ask_to_stop("later")).start()

    results = run_threads(2, Training(2, ask={1: ask}).run)
    assert results[0] == results[1]
    assert results[0][0][1].save
    assert results[0][-1][1].stop == "later"


def test_ranks_when_all_are_asked_at_once_agree_on_one_reason() -> None:
    asks = {r: (lambda p, r=r: p.ask_to_stop(f"rank {r}")) for r in range(3)}
    results = run_threads(3, Training(3, ask=asks).run)
    assert results[0] == results[1] == results[2]
    assert results[0][0][1].stop in ("rank 0", "rank 1", "rank 2")


def test_ranks_when_nobody_asks_never_look_into_the_store() -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the loop called store.{name}")

    pause = Pause(rank=0, world_size=2, store=Untouched())
    assert all(pause.after_update() is None for _ in range(1000))


def test_ranks_when_they_do_different_numbers_of_updates_are_told_so() -> None:
    store = HashStore()
    zero, one = (Pause(rank=r, world_size=2, store=store) for r in range(2))
    one.ask_to_stop("x")
    one._look()
    zero._look()
    assert one.after_update() is None
    for _ in range(3):
        one.after_update()
    assert zero.after_update() is None  # rank 0 decides: after its update 2; rank 1 is past 4 already
    with pytest.raises(
        CommError, match="AR622 rank 1 has passed update 5, and all ranks were to pause after 2"
    ):
        one.after_update()


def test_one_process_when_asked_stops_after_the_next_update() -> None:
    pause = Pause(rank=0, world_size=1)
    assert pause.after_update() is None
    pause.ask_to_stop("SIGTERM")
    assert pause.after_update() == Decision("SIGTERM", False)


def test_stop_file_when_it_appears_asks_with_its_reason(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    pause = Pause(rank=0, world_size=1, stop_file=stop_file)
    pause._look()
    assert pause.stop_reason is None
    stop_file.write_text(json.dumps({"why": "SIGUSR1", "unix_time": 1.0}))
    pause._look()
    assert pause.stop_reason == "SIGUSR1 at the launcher"
    assert pause.after_update() == Decision("SIGUSR1 at the launcher", False)


def test_stop_file_when_it_is_no_json_still_asks(tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("")
    pause = Pause(rank=0, world_size=1, stop_file=tmp_path / "stop")
    pause._look()
    assert pause.stop_reason == "the launcher asks to stop"


def test_minutes_when_they_are_over_ask_for_one_save_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("allranks.train.pausing.time.monotonic", lambda: now[0])
    pause = Pause(rank=0, world_size=1)
    pause.ask_to_save_every(60)
    pause._look()
    assert pause.after_update() is None
    now[0] = 161.0
    pause._look()
    assert pause.after_update() == Decision(None, True)
    pause._look()
    assert pause.after_update() is None
