"""Does compress="auto" take what the clock says is fastest, lose no more than it may, and change its mind when the link does?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from allranks.core.errors import UsageError
from allranks.wrap import choosing
from allranks.wrap.choosing import AGAIN, FIRST, KEEPS, TRIES, Choice, Chooser, Link, pick
from allranks.wrap.settings import CompressSettings, LocalSettings


class World:
    """One rank, a clock, and an update that takes as long as its method needs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, takes: dict[str, float], predicted: Sequence[float]
    ) -> None:
        self.takes, self.now, self.name = takes, 0.0, "none"
        self.device, self.is_leader = torch.device("cpu"), True
        self.used: list[str] = []
        self.choices: list[Choice] = []
        monkeypatch.setattr(choosing, "measure", lambda *_: (Link(0.01, 1e7), list(predicted)))
        monkeypatch.setattr(choosing, "_largest", list)
        exchange: Any = self
        self.chooser = Chooser(exchange, tuple(takes), on_choice=self.choices.append, clock=lambda: self.now)

    def use(self, name: str) -> None:
        self.name = name

    def update(self, times: int) -> None:
        for _ in range(times):
            self.chooser.begin()
            self.used.append(self.name)
            self.now += self.takes[self.name]


TRIAL = FIRST + 2 * (TRIES + 1)


def test_auto_when_one_is_faster_then_it_is_taken_after_a_few_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, {"none": 1.0, "bf16": 0.7}, [0.6, 0.3])
    world.update(TRIAL + KEEPS + 10)
    assert world.used[: FIRST + TRIES + 1] == ["none"] * (FIRST + TRIES + 1)
    assert world.used[FIRST + TRIES + 1 :] == ["bf16"] * (TRIES + 1 + KEEPS + 10)
    assert [c.method for c in world.choices] == ["bf16"]
    assert (
        "bf16: per update none 1000 ms, bf16 700 ms; the link gives 80 Mbit/s and 10.0 ms a way"
        in world.choices[0].text()
    )


def test_auto_when_the_gain_is_small_then_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"none": 1.0, "bf16": 0.98}, [0.6, 0.3])
    world.update(TRIAL + 5)
    assert world.used[-1] == "none"


def test_auto_when_one_is_hopeless_then_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"none": 1.0, "bf16": 0.6, "int8": 0.5}, [0.9, 0.5, 2.0])
    world.update(TRIAL + 30)
    assert "int8" not in world.used
    assert "not tried: int8" in world.choices[0].text()


def test_auto_when_the_choice_does_not_keep_its_promise_then_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, {"none": 1.0, "bf16": 0.7}, [0.6, 0.3])
    world.update(TRIAL)
    world.takes["bf16"] = 1.5
    world.update(KEEPS + 5)
    assert world.used[-1] == "none"
    assert [c.method for c in world.choices] == ["bf16", "none"]


def test_auto_when_the_link_changes_later_then_it_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"none": 1.0, "bf16": 1.2}, [0.3, 0.3])
    world.update(TRIAL + 50)
    assert world.used[-1] == "none"
    world.takes["none"] = 3.0
    world.update(AGAIN)
    assert world.used[-1] == "bf16"


def test_auto_when_only_one_is_allowed_then_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"none": 1.0}, [0.5])
    world.update(40)
    assert not world.choices and world.used == ["none"] * 40


def test_pick_when_two_are_close_then_the_one_that_loses_less() -> None:
    assert pick({"none": 1.02, "bf16": 1.0}, ("none", "bf16")) == "none"
    assert pick({"none": 1.04, "bf16": 1.0}, ("none", "bf16")) == "bf16"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "zip"}, "compress='zip'"),
        ({"accuracy": "all"}, "accuracy='all'"),
        ({"rank": 0}, "compress_rank=0"),
    ],
)
def test_compress_when_it_cannot_be_then_ar117(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        CompressSettings(**settings)
    assert caught.value.code == "AR117" and caught.value.what == said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "sync_every=0"),
        ({"every": 2.0}, "sync_every=2.0"),
        ({"every": 4, "outer_optimizer": "adam"}, "outer_optimizer='adam'"),
        ({"outer_optimizer": "nesterov"}, "outer_optimizer='nesterov' with sync_every=1"),
        ({"every": 4, "outer_lr": 0.0}, "outer_lr=0.0, outer_momentum=0.9"),
    ],
)
def test_sync_every_when_it_cannot_be_then_ar118(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        LocalSettings(**settings)
    assert caught.value.code == "AR118" and caught.value.what == said


@pytest.mark.parametrize(("method", "static_graph"), [("bf16", False), ("none", True)])
def test_sync_every_when_beside_what_sends_gradients_then_ar118(method: str, static_graph: bool) -> None:
    with pytest.raises(UsageError) as caught:
        LocalSettings(4).check_with(CompressSettings(method), static_graph=static_graph)
    assert caught.value.code == "AR118"
