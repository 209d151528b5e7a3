"""Is a wrapped model's name that is looked up in a dictionary of bare names noted, and no look-up that is meant so?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from allranks.record import lines, notes, unmatched
from allranks.record.unmatched import compare, looked_up_in
from allranks.record.writer import Writer

Noted = list[dict[str, Any]]


class Wrapper(nn.Module):
    """As DDP: the model is `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            if name in self.shadow:
                self.shadow[name].lerp_(p.detach(), 0.5)

    def update_by_state(self, model: nn.Module) -> None:
        state = model.state_dict()
        for name, value in state.items():
            old = self.shadow.get(name)
            if old is not None:
                old.lerp_(value, 0.5)

    def update_without_prefix(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            key = name if name in self.shadow else name[len("module.") :]
            self.shadow[key].lerp_(p.detach(), 0.5)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    """The marks are on Wrapper; off again at the end."""
    found: Noted = []
    monkeypatch.setattr(notes, "_write", lambda _, kind, values: found.append({"kind": kind, **values}))
    monkeypatch.setattr(notes, "has_room", lambda _: True)
    writer = Writer()
    monkeypatch.setattr(unmatched, "_writer", writer)
    monkeypatch.setattr(unmatched, "_lines", lines.Lines(writer))
    before = list(unmatched._marked)
    unmatched._marked.clear()
    unmatched._after_fork()
    unmatched.mark(Wrapper)
    yield found
    unmatched._stop()
    unmatched._after_fork()
    unmatched._marked[:] = before


@pytest.mark.parametrize("method", ["update", "update_by_state"])
def test_average_of_bare_names_when_updated_by_wrapped_ones_then_it_is_noted_once(
    noted: Noted, method: str
) -> None:
    model = Wrapper()
    average = Average(model.module)
    for _ in range(5):
        getattr(average, method)(model)
    assert [(n["kind"], n["names"], n["keys"], n["calls"]) for n in noted] == [("unmatched", 4, 4, 2)]
    assert (noted[0]["first"], noted[0]["other"]) == ("module.0.weight", "0.weight")
    assert noted[0]["what"] == "self.shadow"
    assert "named_parameters" not in vars(Wrapper)  # the marks are off


def test_average_when_names_match_or_are_made_to_then_nothing_is_noted(noted: Noted) -> None:
    model = Wrapper()
    for _ in range(70):
        Average(model).update(model)
        Average(model.module).update_without_prefix(model)
    average = Average(model.module)
    average.shadow.clear()
    filled: dict[str, Any] = {}
    for _ in range(5):
        average.update(model)
        for name, p in model.named_parameters():
            if name not in filled:
                filled[name] = p.detach().clone()
    assert noted == []


def test_look_at_a_function_then_what_it_holds_is_not_kept_alive(noted: Noted) -> None:
    class Large:
        count = 0

        def __init__(self) -> None:
            Large.count += 1

        def __del__(self) -> None:
            Large.count -= 1

    model, shadow = Wrapper(), {"other": torch.zeros(1)}
    for _ in range(3):
        large = Large()
        for name, _p in model.named_parameters():
            if name in shadow:
                raise AssertionError
        assert large.count == 1
        del large
        assert Large.count == 0  # no copy of the locals holds it


def test_calls_without_end_then_the_marks_come_off(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmatched, "MAX_CALLS", 3)
    for _ in range(3):
        assert len(dict(Wrapper().named_parameters())) == 4
    assert "named_parameters" not in vars(Wrapper)


def test_names_when_compared_then_only_tensors_under_bare_names_count() -> None:
    model = Wrapper()
    bare = {n: p.detach().clone() for n, p in model.module.named_parameters()}
    assert compare(model, bare) is not None
    for prefix in ("_orig_mod.", "_orig_mod.module.", "module._orig_mod."):
        assert compare(model, {prefix + n: p for n, p in bare.items()}) is not None
    for other in (
        {},
        {f"module.{n}": p for n, p in bare.items()},
        {n: 0.0 for n in bare},
        {n: torch.zeros(7) for n in bare},
        {"0.weight": bare["0.weight"], "a": 1, "b": 2},
        bare | {"module.0.weight": bare["0.weight"]},
        {3: torch.zeros(3, 2)},
    ):
        assert compare(model, other) is None


LOOP = "def f(self, model, d):\n    for k, v in model.named_parameters():\n        "


@pytest.mark.parametrize(
    "source, line, chains",
    [
        (LOOP + "if k in d: d[k] = v", 2, [("d",)]),
        (LOOP + "if v.requires_grad and k not in self.a.b: continue", 2, [("self", "a", "b")]),
        (LOOP + "x = self.d.get(k)", 2, [("self", "d")]),
        ("s = model.state_dict()\nfor k in s:\n    if k in d: d[k] = s[k]", 1, [("d",)]),
        ("s = dict(model.named_parameters())\nfor k, v in s.items():\n    if k in d: pass", 1, [("d",)]),
        (LOOP + "k = k[7:]\n        if k in d: pass", 2, []),
        (LOOP + "if k in d or k[7:] in d: pass", 2, []),
        (LOOP + "if k in d: pass\n        print(k)", 2, []),
        (LOOP + "d[k] = v", 2, []),
        (LOOP + "if k in d(): pass", 2, []),
        (LOOP + "if v in d: pass", 2, []),
        (LOOP + "if k in d: pass", 3, []),
        ("for i, (k, v) in enumerate(model.named_parameters()):\n    if k in d: pass", 1, []),
        ("n = [k for k, v in model.named_parameters() if k in d]", 1, []),
        ("", 1, []),
    ],
)
def test_source_of_a_loop_then_what_its_names_are_looked_up_in(
    source: str, line: int, chains: list[tuple[str, ...]]
) -> None:
    assert looked_up_in(source, line) == chains


def test_source_with_a_backslash_then_python_does_not_warn_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert looked_up_in("x = '\\d'\n" + LOOP + "if k in d: pass", 3) == [("d",)]


def test_locals_that_the_script_keeps_when_its_loop_is_looked_at_then_they_stay(noted: Noted) -> None:
    model = Wrapper()

    def train(rate: float) -> dict[str, Any]:
        settings = locals()
        shadow = {name: p.detach().clone() for name, p in model.module.named_parameters()}
        for _ in range(3):
            for name, p in model.named_parameters():
                if name in shadow:
                    shadow[name].lerp_(p.detach(), rate)
        return settings

    assert train(0.5)["rate"] == 0.5
    assert len(noted) == 1
