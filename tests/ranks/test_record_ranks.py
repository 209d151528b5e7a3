"""Does install() mark torch in processes where it was imported long before, and tell when the others do not come?"""

from __future__ import annotations

from datetime import timedelta

import pytest

from support.ranks import run_outcomes, run_ranks

pytestmark = pytest.mark.ranks


def record_after_some_calls() -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed import all_reduce as taken_before
    from torch.nn.parallel import DistributedDataParallel

    from allranks.record import install, recorder
    from allranks.record.page import read_page

    globals()["taken"] = taken_before  # as a module that took the name before us
    install()
    install()
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
    globals()["taken"](torch.ones(2))
    dist.barrier()
    path = recorder().path
    assert path is not None
    record = read_page(path)
    return {
        "place": (record.rank, record.world_size, record.is_in_process),
        "step": record.step,
        "ops": [c.op for c in record.collectives],
        "lines": [c.line.split(" ")[-1] for c in record.collectives],
        "issued": record.issued,
        "aside": record.has_stepped_aside,
        "folder": path.rsplit("/", 1)[0],
        "model": record.model.hash if record.model else 0,
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_install_when_torch_was_there_before_then_all_is_marked(world_size: int) -> None:
    results = run_ranks(world_size, record_after_some_calls)
    for rank, found in enumerate(results):
        assert found["place"] == (rank, world_size, True)
        assert (found["step"], found["issued"], found["aside"]) == (3, 2, False)
        assert found["ops"] == ["all_reduce", "barrier"]
        assert found["lines"] == ["record_after_some_calls"] * 2
    assert len({found["model"] for found in results}) == 1


def folder_when_done() -> str:
    from allranks.record import install, recorder

    install()
    return (recorder().path or "").rsplit("/", 1)[0]


def test_install_when_process_has_ended_then_its_folder_is_gone() -> None:
    from pathlib import Path

    folders = run_ranks(2, folder_when_done)
    assert len(set(folders)) == 2
    assert not any(Path(folder).exists() for folder in folders)


def killed_and_then_another() -> tuple[str, bool]:
    import os
    from pathlib import Path

    from allranks.record import install, recorder

    child = os.fork()
    if child == 0:
        install()
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    from allranks.record import inprocess

    left = inprocess.folder_of(child)
    assert left is not None
    install()
    return (recorder().path or ""), Path(left).exists()


def test_install_when_another_was_killed_then_its_folder_is_removed() -> None:
    ((path, is_left),) = run_ranks(1, killed_and_then_another)
    assert path and not is_left


def wait_alone(rank: int) -> None:
    import torch
    import torch.distributed as dist

    from allranks.record import install

    install()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        dist.all_reduce(torch.ones(5), group=group)


def wait_alone_on_rank_zero() -> None:
    import os

    wait_alone(int(os.environ["RANK"]))


def test_collective_when_nobody_comes_then_the_rank_says_where_it_was() -> None:
    outcomes = run_outcomes(2, wait_alone_on_rank_zero)
    said = outcomes[0].output
    assert "[allranks] rank 0 of 2 on host" in said, said
    assert "all_reduce [5] float32 in group" in said
    assert "test_record_ranks.py" in said and "Current thread" in said
    assert "[allranks]" not in outcomes[1].output


def described_model(width: int) -> tuple[int, int]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from allranks.record import install, recorder
    from allranks.record import layout as at

    install()
    DistributedDataParallel(torch.nn.Linear(2, width))
    return recorder().words[at.W_MODEL_HASH], recorder().words[at.W_MODEL_PARAMS]


def test_models_when_they_differ_then_so_do_their_hashes() -> None:
    # Each in a job of its own: two ranks with different models would wait for the group's timeout (30 s).
    found = [run_ranks(1, described_model, width)[0] for width in (4, 5, 4)]
    assert found[0] == found[2] != found[1]
    assert {parameters for _, parameters in found} == {2}
