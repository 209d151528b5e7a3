"""Does a run that was killed and started again end bit for bit as one that never was?"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import allranks
from allranks.ckpt.background import Background, Job
from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks
NUM_EPOCHS = 2


@dataclass(frozen=True)
class Case:
    """One training, and where it is killed."""

    run_dir: str
    source: str = "map"  # "map", "stream", "stream with state", "torchdata", "two optimizers"
    precision: str = "fp32"
    num_workers: int = 0
    kill_after: int | None = None  # updates
    kill_in_window: bool = False
    kill_in_save: int | None = None  # the n-th write of a save, on rank 0
    kill_rank: int | None = None  # all ranks if None
    save_steps: int | None = 1
    is_through_ddp: bool = False  # gradients go by DDP's own all-reduce, as between hosts
    width: int = 8


class Augmented(torch.utils.data.Dataset[Any]):
    """Every sample is made of its index and of all three sources of randomness."""

    def __len__(self) -> int:
        return 54

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        noise = torch.rand(4) * random.random() + float(np.random.rand())
        return torch.full((4,), index / 54) + noise, index % 3, index


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        for index in range(54):
            yield Augmented()[index]


class StreamWithState(Stream):
    """A stream that can begin in the middle, and says so."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        while self.at < 54:
            self.at += 1
            yield Augmented()[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


SOURCES = {
    "map": Augmented,
    "two optimizers": Augmented,
    "stream": Stream,
    "stream with state": StreamWithState,
}


class Best:
    """A user's own object."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses, "best": np.float64(min(self.losses, default=9.0))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])
        assert isinstance(state["best"], np.float64)


def source_of(case: Case) -> dict[str, Any]:
    """What run.loader is given."""
    # "fork" as users have it; these ranks come from a forkserver.
    workers = {
        "num_workers": case.num_workers,
        "multiprocessing_context": "fork" if case.num_workers else None,
    }
    if case.source == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return {"source": StatefulDataLoader(Augmented(), batch_size=12, shuffle=True, **workers)}
    shuffle = None if "stream" in case.source else True
    return {"source": SOURCES[case.source](), "shuffle": shuffle, **workers}


def train(case: Case) -> dict[str, Any]:
    """Train; what each update saw and did, and a digest of all that is left at the end."""
    torch.use_deterministic_algorithms(True)
    seen: list[tuple[int, int, str, tuple[int, ...]]] = []
    with allranks.start(
        case.run_dir, global_batch_size=12, accumulation_steps=2, precision=case.precision, seed=3
    ) as run:
        width = case.width
        net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 3))
        model = run.model(net, shared_memory=False if case.is_through_ddp else "auto")
        adam = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02), clip_norm=1.0)
        run.scheduler(torch.optim.lr_scheduler.StepLR(adam, 3, 0.9))
        run.scheduler(torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10), per="epoch")
        critic = None
        if case.source == "two optimizers":
            critic = run.model(nn.Linear(width, 1), name="critic")
            sgd = run.optimizer(torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9), name="critic")
        ema = run.ema(model, decay=0.9)
        train_set = run.loader(**source_of(case), train=True)
        test_set = run.loader(Augmented(), train=False, num_workers=0)
        best, own = Best(), Best()
        run.track(best=best)
        run.track(per_rank=True, own=own)
        run.save_every(steps=case.save_steps, epochs=1)
        if case.kill_in_save is not None and run.rank == (case.kill_rank or 0):
            die_in_write(case.kill_in_save)
        found = run.resume()
        resumed_at = found.manifest.step if found is not None else 0
        for epoch in run.epochs(NUM_EPOCHS):
            for x, y, index in train_set:
                if critic is not None:
                    with torch.no_grad():
                        features = net[0](x)
                    run.step(critic(features).square().mean(), optimizer=sgd)
                loss = F.cross_entropy(model(x), y)
                update = run.step(loss, optimizer=adam)
                own.losses.append(loss.item())
                if update is not None:
                    total = run.mean(loss.detach())
                    best.losses.append(total)
                    seen.append((epoch, update.number, total.hex(), tuple(index.tolist())))
                    (
                        random.random(),
                        np.random.rand(),
                        torch.rand(1),
                    )  # the loop's own randomness, after the update
                    die_if(case, run, not case.kill_in_window, update.number)
                else:
                    die_if(case, run, case.kill_in_window, run.updates)
            with run.evaluate(), torch.no_grad():
                noisy = run.sum(model(x).sum() for x, _, _ in test_set)
            seen.append((epoch, -1, float(noisy).hex(), ()))
        last = {
            "weights": digest(model.state_dict()),
            "optimizer": digest(adam.state_dict()),
            "average": digest(ema.state_dict()),
            "own": digest(own.losses),
            "best": digest(best.losses),
            "random": digest(allranks.ckpt.random_states()),
            "lr": adam.param_groups[0]["lr"],
        }
        return {"seen": seen, "last": last, "resumed_at": resumed_at}


def die_if(case: Case, run: Any, here: bool, update: int) -> None:
    if here and case.kill_after == update and case.kill_rank in (None, run.rank):
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_write(number: int) -> None:
    """Kill this process in the number-th write of a checkpoint, half of it written."""
    real, count = os.write, 0

    def write(fd: int, data: Any) -> int:
        nonlocal count
        if "/checkpoints/" in Path(f"/proc/self/fd/{fd}").readlink().as_posix():
            count += 1
            if count == number:
                real(fd, data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, data)

    os.write = write


def digest(value: Any) -> str:
    """A hash of every bit of a nested value."""
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, dict):
            for key, item in part.items():
                hashed.update(str(key).encode())
                add(item)
        elif isinstance(part, (list, tuple)):
            for item in part:
                add(item)
        elif isinstance(part, torch.Tensor):
            hashed.update(part.detach().contiguous().numpy().tobytes())
        elif isinstance(part, np.ndarray):
            hashed.update(part.tobytes())
        else:
            hashed.update(repr(part).encode())

    add(value)
    return hashed.hexdigest()[:16]


CASES = {
    "after an update": Case("", kill_after=7),
    "at the end of an epoch": Case("", kill_after=6, save_steps=5),
    "in the middle of a window": Case("", kill_after=6, kill_in_window=True),
    "in the middle of a save": Case("", kill_in_save=40),
    "with loader workers": Case("", kill_after=7, kill_in_window=True, num_workers=2),
    "bf16": Case("", kill_after=3, precision="bf16"),
    "fp16 with a scaler": Case("", kill_after=7, kill_in_window=True, precision="fp16"),
    "stream": Case("", kill_after=7, kill_in_window=True, source="stream"),
    "stream with state and workers": Case(
        "", kill_after=3, kill_in_window=True, source="stream with state", num_workers=2
    ),
    "torchdata's StatefulDataLoader": Case(
        "", kill_after=7, kill_in_window=True, source="torchdata", num_workers=2
    ),
    "two optimizers": Case("", kill_after=7, kill_in_window=True, source="two optimizers"),
    "through DDP": Case("", kill_after=3, is_through_ddp=True, width=512),
}


ON_ONE_RANK_TOO = ("after an update", "in the middle of a save", "stream with state and workers")
RUNS = [(name, 2) for name in CASES if name != "through DDP"] + [(name, 1) for name in ON_ONE_RANK_TOO]
# With 3 ranks the order of additions may be another, where with 2 it makes no difference.
RUNS += [("through DDP", 3)]


@pytest.mark.parametrize(("name", "world_size"), RUNS)
def test_run_when_killed_and_started_again_ends_bit_for_bit_the_same(
    name: str, world_size: int, tmp_path: Path
) -> None:
    case = CASES[name]
    whole = run_ranks(
        world_size, train, replace(case, run_dir=str(tmp_path / "whole"), kill_after=None, kill_in_save=None)
    )
    killed = replace(
        case, run_dir=str(tmp_path / "killed"), kill_rank=None if case.kill_in_save is None else 0
    )
    run_ranks_that_die(world_size, killed)
    again = run_ranks(world_size, train, replace(killed, kill_after=None, kill_in_save=None))
    for rank, (a, b) in enumerate(zip(whole, again, strict=True)):
        assert b["resumed_at"], f"rank {rank} began anew"
        assert b["seen"] and b["seen"] == a["seen"][-len(b["seen"]) :], f"rank {rank} saw something else"
        assert b["last"] == a["last"], f"rank {rank} ended elsewhere"


def run_ranks_that_die(world_size: int, case: Case) -> None:
    outcomes = run_outcomes(world_size, train, case)
    assert any(o.exit_signal == signal.SIGKILL for o in outcomes), [o.story() for o in outcomes]


def train_and_log(run_dir: str, die_after: int | None, log: str) -> None:
    """Train, and write down the samples of each update as it goes; a killed rank cannot tell."""
    with allranks.start(run_dir, global_batch_size=12, seed=3) as run:
        model = run.model(nn.Linear(4, 3))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
        loader = run.loader(Augmented(), shuffle=True, num_workers=0)
        run.save_every(steps=1)
        for epoch in run.epochs(2):
            for x, y, index in loader:
                update = run.step(F.cross_entropy(model(x), y))
                assert update is not None
                with Path(f"{log}-{run.rank}").open("a") as out:
                    out.write(f"{epoch} {update.number} {index.tolist()}\n")
                if update.number == die_after:
                    run.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)


def read_logs(log: Path, world_size: int) -> dict[tuple[int, int], list[int]]:
    samples: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        for line in Path(f"{log}-{rank}").read_text().splitlines():
            epoch, update, rest = line.split(" ", 2)
            samples.setdefault((int(epoch), int(update)), []).extend(json.loads(rest))
    return {key: sorted(value) for key, value in samples.items()}


def test_run_when_resumed_on_2_then_3_then_1_ranks_sees_every_sample_of_every_epoch_once(
    tmp_path: Path,
) -> None:
    run_dir = str(tmp_path / "run")
    logs = []
    for world_size, die_after in ((2, 4), (3, 7), (1, None)):
        log = tmp_path / f"log{world_size}"
        args = (run_dir, die_after, str(log))
        if die_after is None:
            run_ranks(world_size, train_and_log, *args)
        else:
            outcomes = run_outcomes(world_size, train_and_log, *args)
            assert all(o.exit_signal == signal.SIGKILL for o in outcomes), [o.story() for o in outcomes]
        logs.append(read_logs(log, world_size))
    first, second, third = logs
    assert min(second)[1] > 1 and min(third)[1] > min(second)[1], "each went on, none began anew"
    for earlier, later in ((first, second), (second, third)):
        # What was not saved is done again: with the same samples.
        assert all(later[key] == earlier[key] for key in earlier.keys() & later.keys())
    whole = {**first, **second, **third}
    for epoch in (0, 1):
        seen = [i for (e, _), batch in whole.items() if e == epoch for i in batch]
        assert sorted(seen) == list(range(54))
    assert sorted(update for _, update in whole) == list(range(1, 11))


def resume_on_more(run_dir: str) -> tuple[float, bool, float]:
    with allranks.start(run_dir, global_batch_size=12, seed=3) as run:
        model = run.model(nn.Linear(4, 3))
        run.optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
        run.loader(Augmented(), shuffle=True, num_workers=0)
        return torch.rand(1).item(), run.resume() is not None, torch.rand(1).item()


def test_ranks_when_there_are_more_than_before_draw_random_numbers_of_their_own(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    run_ranks(1, train_and_log, run_dir, None, str(tmp_path / "log"))
    rows = run_ranks(3, resume_on_more, run_dir)
    assert all(found for _, found, _ in rows)
    assert len({after for _, _, after in rows}) == 3
    assert rows == run_ranks(3, resume_on_more, run_dir), "and the same ones each time"


def train_with_the_writer_late(run_dir: str) -> list[tuple[bool, bool]]:
    """Of each save of steps: whether it left something to copy, and whether the copy is that of the moment of the save."""
    start, may_go = Background.start, threading.Event()

    def start_late(self: Background, name: str, job: Job) -> None:
        start(self, name, lambda give_up: (name == "the buffers" or may_go.wait(60), job(give_up)))

    Background.start = start_late
    with allranks.start(run_dir, global_batch_size=12, seed=3) as run:
        model = run.model(nn.Linear(4, 3))
        adam = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
        run.save_every(steps=1)
        found = []
        for _ in run.epochs(1):
            for x, y, _ in run.loader(Augmented(), shuffle=True, num_workers=0):
                checkpoints = run._checkpoints
                saved = checkpoints is not None and not checkpoints.is_settled
                before = [adam.state[p]["exp_avg"].clone() for p in model.parameters() if p in adam.state]
                run.step(F.cross_entropy(model(x), y))
                assert checkpoints is None or checkpoints.is_settled
                may_go.set()
                if checkpoints is not None:
                    checkpoints.wait()
                if checkpoints is not None and run.is_rank_zero and before:
                    newest = checkpoints.latest()
                    assert newest is not None
                    state = newest.training()["optimizers"]["optimizer"]["state"]
                    same = all(torch.equal(state[n]["exp_avg"], b) for n, b in enumerate(before))
                    found.append((saved, same))
                may_go.clear()
            may_go.set()
    return found


def test_save_when_the_writer_comes_after_the_next_update_then_the_state_is_that_of_the_save(
    tmp_path: Path,
) -> None:
    found, others = run_ranks(2, train_with_the_writer_late, str(tmp_path / "run"))
    assert len(found) >= 3 and set(found) == {(True, True)} and not others
