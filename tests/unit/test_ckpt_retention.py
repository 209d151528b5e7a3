"""Which checkpoints stay, and is the newest always among them?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks import ckpt
from allranks.ckpt import Checkpoints, Retention, Snapshot
from allranks.ckpt.retention import Kept, to_remove
from allranks.core.errors import UsageError


def kept(*steps: int, **values: float) -> list[Kept]:
    return [Kept(f"s{s}", s, {"accuracy": values[f"s{s}"]} if f"s{s}" in values else {}) for s in steps]


def test_keep_leaves_the_newest() -> None:
    assert to_remove(kept(1, 2, 3, 4), Retention(keep=2), "s4") == ["s1", "s2"]


def test_keep_none_leaves_all() -> None:
    assert to_remove(kept(1, 2, 3, 4), Retention(keep=None), "s4") == []


def test_keep_every_leaves_multiples_for_good() -> None:
    assert to_remove(kept(10, 15, 20, 25, 30), Retention(keep=1, keep_every=20), "s30") == [
        "s10",
        "s15",
        "s25",
    ]


@pytest.mark.parametrize(("best_is", "removed"), [("highest", ["s1", "s3"]), ("lowest", ["s1", "s2"])])
def test_best_leaves_the_best_and_of_equal_ones_the_newest(best_is: str, removed: list[str]) -> None:
    if best_is == "highest":
        rows = kept(1, 2, 3, 4, s1=0.9, s2=0.9, s3=0.1, s4=float("nan"))
    else:
        rows = kept(1, 2, 3, 4, s1=0.1, s2=0.9, s3=0.1, s4=float("nan"))
    rule = Retention(keep=1, best="accuracy", best_is=best_is)  # type: ignore[arg-type]
    assert to_remove(rows, rule, "s4") == removed


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": 0},
        {"keep": -1},
        {"keep": True},
        {"keep": 2.5},
        {"keep_every": 0},
        {"best": "accuracy"},
        {"best_is": "lowest"},
        {"best": "loss", "best_is": "min"},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"AR611 .*{next(iter(wrong))}"):
        Retention(**wrong)  # type: ignore[arg-type]


@given(
    st.lists(st.integers(1, 50), unique=True, min_size=1).map(sorted),
    st.integers(1, 5),
    st.none() | st.integers(1, 10),
    st.data(),
)
def test_newest_and_its_predecessors_always_stay(
    steps: list[int], keep: int, every: int | None, data: st.DataObject
) -> None:
    values = {f"s{s}": data.draw(st.floats(0, 1)) for s in steps}
    rule = Retention(keep=keep, keep_every=every, best="accuracy", best_is="highest")
    gone = to_remove(kept(*steps, **values), rule, f"s{steps[-1]}")
    stay = [s for s in steps if f"s{s}" not in gone]
    assert stay[-keep:] == steps[-keep:]
    assert max(values[f"s{s}"] for s in stay) == max(values.values())
    assert not every or all(s in stay for s in steps if s % every == 0)


def test_saves_in_a_row_leave_what_the_rule_says_on_the_disk(tmp_path: Path) -> None:
    checkpoints = Checkpoints(
        tmp_path, retention=Retention(keep=2, keep_every=4, best="accuracy", best_is="highest")
    )
    for step in range(1, 8):
        checkpoints.save(Snapshot(step=step, metrics={"accuracy": 1 - abs(step - 2) / 10}))
    checkpoints.close()
    assert [int(f[5:]) for f in ckpt.open_store(tmp_path).folders()] == [2, 4, 6, 7]


def test_damaged_ones_are_not_counted_among_the_kept_and_not_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, retention=Retention(keep=2))
    for step in (1, 2):
        checkpoints.save(Snapshot(step=step), blocking=True)
    (tmp_path / "step-00000002" / "manifest.json").write_text("torn")
    checkpoints.save(Snapshot(step=3), blocking=True)
    assert ckpt.open_store(tmp_path).folders() == ["step-00000001", "step-00000002", "step-00000003"]
