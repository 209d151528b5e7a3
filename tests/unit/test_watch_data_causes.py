"""Are data that ranks share, repeat, miss or list differently named from what was noted, and is nothing said of others?"""

from __future__ import annotations

from typing import Any

import pytest

from support.noted import LINE, codes, said


def data(hash: int = 7, length: int = 640, **more: Any) -> dict[str, Any]:
    return {
        "class": "Images",
        "code": "",
        "length": length,
        "hash": hash,
        "is_telling": True,
        "parts": [],
        **more,
    }


def a_pass(
    number: int = 1, *, first: tuple[int, ...] = (5, 1, 9, 3), dataset: Any = None, **more: Any
) -> dict[str, Any]:
    """The note of a well-divided training pass."""
    facts: dict[str, Any] = {
        "iterable": False, "sampler": "DistributedSampler", "is_torchs": True, "share": 320, "shuffle": True, "replacement": False,
        "set_epoch": True, "num_replicas": 2, "sampler_rank": -1, "seed": 0, "batch_size": 8, "num_workers": 0, "padded": 0,
        "dataset": dataset or data(),
    }  # fmt: skip
    base = {"kind": "pass", "loader": 1, "number": number, "line": LINE, "training": True, "epoch": 0}
    base |= {"first": list(first), "count": 24, "hash": hash(first)}
    return base | (facts if number == 1 else {}) | more


def seen(samples: tuple[int, ...], **more: Any) -> dict[str, Any]:
    base = {"kind": "seen", "loader": 1, "number": 1, "line": LINE, "training": True, "drawn": 40}
    return (
        base
        | {
            "samples": len(samples),
            "kept": len(samples),
            "distinct": len(set(samples)),
            "sketch": sorted(set(samples)),
        }
        | more
    )


OWN = {"sampler": "RandomSampler", "share": 640, "num_replicas": -1, "set_epoch": False}


# --- data ---


def test_order_when_two_epochs_begin_alike_then_set_epoch_is_named() -> None:
    other = (6, 2, 8, 4)
    verdict = said([a_pass(), a_pass(2)], [a_pass(first=other), a_pass(2, first=other)])
    assert (verdict.code, verdict.ranks) == ("AR742", (0, 1))
    assert "set_epoch was not called (DistributedSampler)" in verdict.head()
    assert verdict.where[0].startswith("/home/ann/train.py:27")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (a_pass(), a_pass(2, first=(2, 8, 4, 1))),
        (a_pass(shuffle=False), a_pass(2)),
        (a_pass(training=False), a_pass(2, training=False)),
        (a_pass(), a_pass(3)),  # the second pass is not known
        (a_pass(set_epoch=False), a_pass(2)),
    ],
)
def test_order_when_as_it_should_be_then_silent(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert "AR742" not in codes([first, second], [first, second])


def test_data_when_every_rank_reads_all_of_it_then_named() -> None:
    verdict = said([a_pass(**OWN)], [a_pass(**OWN, first=(4, 2, 1, 8))])
    assert verdict.code == "AR741"
    assert "all 640 samples of Images" in verdict.head()
    assert verdict.confidence == "likely"
    assert said([a_pass(**OWN)], [a_pass(**OWN)]).confidence == "certain"


def test_data_when_a_batch_sampler_gives_all_to_each_then_its_class_is_named() -> None:
    own = [a_pass(**(OWN | {"sampler": "Buckets", "share": -1, "is_torchs": False})), seen(tuple(range(640)))]
    assert "(Buckets)" in said(own, own).head()


@pytest.mark.parametrize(
    "other",
    [
        {"dataset": data(8)},  # another shard
        {"dataset": data(is_telling=False)},
        {"training": False},  # all ranks evaluate everything
        {"replacement": True},
        {"dataset": data(length=8)},
    ],
)
def test_data_when_ranks_have_their_own_or_train_not_then_silent(other: dict[str, Any]) -> None:
    one, two = a_pass(**OWN), a_pass(**OWN, first=(4, 2, 1, 8)) | other
    assert codes([one if "dataset" in other and other["dataset"]["hash"] == 8 else one | other], [two]) == []


def test_samples_when_the_seeds_of_the_samplers_differ_then_named_with_them() -> None:
    verdict = said([a_pass()], [a_pass(seed=1, first=(4, 2, 1, 8))])
    assert verdict.code == "AR740"
    assert "seed 0 on rank 0, 1 on rank 1" in verdict.facts[0]


def test_samples_when_own_orders_overlap_then_the_share_is_named() -> None:
    custom = {"sampler": "EverySecond", "is_torchs": False, "num_replicas": -1}
    one, two = tuple(range(320)), tuple(range(160, 480))
    verdict = said([a_pass(**custom), seen(one)], [a_pass(**custom, first=(4, 2, 1, 8)), seen(two)])
    assert verdict.code == "AR740"
    assert "50 % of them are the same" in verdict.head()


def test_samples_when_shares_only_touch_by_padding_then_silent() -> None:
    one, two = tuple(range(320)), (*range(321, 640), 0)
    assert codes([a_pass(), seen(one)], [a_pass(first=(4, 2, 1, 8)), seen(two)]) == []


def first(worker: int, number: int, hash: int) -> dict[str, Any]:
    return {
        "kind": "first",
        "worker": worker,
        "number": number,
        "hash": hash,
        "dataset": "Stream",
        "code": LINE,
        "items": 4,
    }


def test_stream_when_workers_and_ranks_read_the_same_then_counted() -> None:
    own = [first(w, n, 10 * n) for w in (0, 1) for n in (1, 2)]
    verdict = said(own, own)
    assert verdict.code == "AR743"
    assert "each sample of Stream comes 4 times" in verdict.head()


def test_stream_when_split_or_all_alike_then_silent() -> None:
    split = [[first(w, n, 100 * r + 10 * w + n) for w in (0, 1) for n in (1, 2)] for r in (0, 1)]
    assert codes(*split) == []
    alike = [first(w, n, 5) for w in (0, 1) for n in (1, 2)]
    assert codes(alike, alike) == []


def test_data_when_one_rank_gets_no_batch_then_it_is_named() -> None:
    verdict = said([a_pass(), seen((1, 2))], [a_pass(first=()), seen((), drawn=0)])
    assert (verdict.code, verdict.ranks) == ("AR744", (1,))
    assert codes([a_pass(first=()), seen((), drawn=0)], [a_pass(first=()), seen((), drawn=0)]) == []


def test_randomness_when_generators_are_in_one_state_then_named() -> None:
    one = {"kind": "draws", "worker": 0, "dataset": "Noisy", "code": LINE, "states": {"torch": 1, "numpy": 5}}
    verdict = said([one], [one | {"states": {"torch": 1, "numpy": 6}}])
    assert verdict.code == "AR745"
    assert "(torch)" in verdict.head()
    assert codes([one], [one | {"states": {"torch": 2}}]) == []
    assert codes([one], [one | {"worker": 1}]) == []


def evaluated(ops: list[list[Any]], padded: int = 2, length: int = 10) -> dict[str, Any]:
    base = {
        "kind": "evaluated",
        "loader": 2,
        "number": 1,
        "line": LINE,
        "ops": ops,
        "length": length,
        "padded": padded,
    }
    return base | {"num_replicas": 3, "sampler_rank": 0, "last": [0, 3], "shuffle": False}


def test_evaluation_when_padding_is_counted_then_who_and_which_are_named() -> None:
    notes = [[evaluated([["all_reduce", 2]]) | {"sampler_rank": r}] for r in range(3)]
    verdict = said(*notes)
    assert verdict.code == "AR746"
    assert "12 samples of 10: 2 repeated on ranks 1 and 2" in verdict.head()
    assert "indices 0, 1" in verdict.facts[0]


@pytest.mark.parametrize(
    "note",
    [
        evaluated([]),
        evaluated([["all_gather", 4], ["all_reduce", 2]]),  # trimmed, perhaps
        evaluated([["all_reduce", 5000]]),
        evaluated([["all_reduce", 2]], padded=1, length=50_000),
    ],
)
def test_evaluation_when_it_may_be_right_then_silent(note: dict[str, Any]) -> None:
    assert codes([note], [note], [note]) == []


def test_split_when_training_holds_evaluated_samples_then_counted() -> None:
    note = {
        "kind": "leak",
        "both": 64,
        "some": [512, 513],
        "train": 576,
        "evaluate": 128,
        "train_line": LINE,
        "line": LINE,
    }
    assert "64 of 128 samples that are evaluated" in said([note], [note]).head()


def files(*hashes: Any) -> dict[str, Any]:
    return data(8, parts=[["files", 4, *hashes]])


def test_files_when_listed_in_another_order_then_the_first_difference_is_named() -> None:
    one = a_pass(dataset=files(1, 50, ["'a'", "'b'"], [1, 2, 3, 4]))
    two = a_pass(dataset=files(2, 50, ["'b'", "'a'"], [1, 2, 3, 4]))
    verdict = said([one], [two])
    assert verdict.code == "AR748"
    assert verdict.facts[0] == "first difference at 0: 'a' on rank 0, 'b' on rank 1"


def test_files_when_each_rank_has_its_own_or_the_same_then_silent() -> None:
    one = a_pass(dataset=files(1, 50, ["'a'", "'b'"], [1, 2]))
    assert codes([one], [a_pass(first=(4, 2, 1, 8), dataset=files(2, 60, ["'c'", "'d'"], [3, 4]))]) == []
    assert "AR748" not in codes([one], [one])


def test_split_when_indices_differ_then_named() -> None:
    def subset(order: int) -> dict[str, Any]:
        return data(order, parts=[["indices", 500, order, order, ["4", str(order)], []]]) | {
            "class": "Subset"
        }

    one, two = a_pass(dataset=subset(1)), a_pass(dataset=subset(2))
    assert said([one], [two]).code == "AR749"
    assert "AR749" not in codes([one], [one])
    assert "AR749" not in codes([one | {"num_replicas": -1}], [two | {"num_replicas": -1}])
