"""Is the attribute named that keeps an object from being copied or saved?"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from allranks.record import unpicklable


class Net(nn.Module):
    """A model of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Config:
    """Notes what it is asked for and has not got."""

    asked: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(name)


def copied(value: Any) -> None:
    copy.deepcopy(value)


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


def pickled(value: Any) -> None:
    pickle.dumps(value)


def path_of(call: Callable[[Any], None], value: Any) -> str:
    with pytest.raises(TypeError, match="pickle") as caught:
        call(value)
    return unpicklable.path_in(caught.value)


@pytest.mark.parametrize("call", [copied, saved])
def test_model_when_a_layer_holds_a_lock_then_its_attribute_is_named(call: Callable[[Any], None]) -> None:
    model = Net()
    model.body[1].lock = threading.Lock()  # type: ignore[assignment]
    assert path_of(call, model) == "Net.body.1.lock"


@pytest.mark.parametrize("call", [copied, saved])
def test_dictionary_when_a_value_inside_is_a_generator_then_keys_and_numbers_are_named(
    call: Callable[[Any], None],
) -> None:
    state = {"step": 3, "data": [1, (number for number in range(3))]}
    assert path_of(call, state) == "dict['data'][1]"


def test_object_when_it_has_its_own_getattr_then_it_is_not_called() -> None:
    config = Config()
    config.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError) as caught:
        copied({"config": config})
    asked = len(config.asked)
    assert asked and unpicklable.path_in(caught.value) == "dict['config'].lock"
    assert len(config.asked) == asked


def test_containers_of_the_users_own_then_their_methods_are_not_called() -> None:
    class Own(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("asked")

    class Row(list[Any]):
        def __iter__(self) -> Any:
            raise RuntimeError("asked")

    lock = threading.Lock()
    found = dict(unpicklable._inside({"own": Own(row=Row([lock]))}))
    assert found["dict['own']['row'][0]"] is lock


def test_object_that_holds_itself_then_the_search_ends() -> None:
    ring: list[Any] = []
    ring.append(ring)
    ring.append({"lock": threading.Lock(), "ring": ring})
    assert path_of(copied, ring) == "list[1]['lock']"


def test_pickle_when_it_was_called_directly_then_no_path_is_told() -> None:
    assert path_of(pickled, {"lock": threading.Lock()}) == ""


def test_other_exceptions_then_nothing_is_looked_for() -> None:
    assert unpicklable.path_in(TypeError("unsupported operand")) == ""
    assert unpicklable.path_in(ValueError("cannot pickle 'lock' object")) == ""
