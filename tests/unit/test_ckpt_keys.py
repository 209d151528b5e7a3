"""Do weights that do not fit say why, and do those that only carry a wrapper's prefix fit?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allranks.ckpt.keys import Shape, does_not_fit, fit, plain_name


def shapes_of(net: torch.nn.Module) -> dict[str, Shape]:
    return {name: tuple(value.shape) for name, value in net.state_dict().items()}


def make_net(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
    )


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_fit_when_names_carry_a_wrappers_prefix_on_either_side_is_complete(prefix: str) -> None:
    plain = shapes_of(make_net())
    wrapped = {prefix + name: shape for name, shape in plain.items()}
    for found, expected in ((wrapped, plain), (plain, wrapped)):
        match = fit(found, expected)
        assert match.is_complete
        assert set(match.wrappers) == {f"{part}." for part in prefix.strip(".").split(".")}
        assert {plain_name(f): plain_name(e) for f, e in match.names.items()} == {n: n for n in plain}


def test_fit_when_only_a_part_was_compiled_is_complete() -> None:
    assert fit({"a._orig_mod.weight": (1,), "b": (2,)}, {"a.weight": (1,), "b": (2,)}).is_complete


def test_fit_when_a_real_layer_is_called_module_is_exact() -> None:
    names: dict[str, Shape] = {"module.weight": (1,), "weight": (2,)}
    match = fit(names, names)
    assert match.is_complete and match.names == {n: n for n in names} and not match.wrappers


def test_fit_when_two_names_become_one_without_prefixes_guesses_nothing() -> None:
    match = fit({"module.w": (1,), "_orig_mod.w": (1,)}, {"w": (1,)})
    assert match.missing == ("w",) and set(match.unexpected) == {"module.w", "_orig_mod.w"}


def test_error_groups_missing_unexpected_and_shapes_with_both_shapes() -> None:
    found = shapes_of(make_net(width=5))
    found["head.weight"] = found["head.bias"] = (7,)
    expected = shapes_of(make_net(width=4))
    expected |= {"tail.weight": (1,), "tail.bias": (1,)}
    text = str(does_not_fit(fit(found, expected), "model 'model'", "runs/x/step-00000001"))
    assert text.startswith("AR605 runs/x/step-00000001 does not fit model 'model'")
    assert "0.weight: [5, 3] in the checkpoint, [4, 3] in the model" in text
    assert "2 of 11 missing in the checkpoint: tail.{weight, bias}" in text
    assert "2 of 11 not in the model: head.{weight, bias}" in text
    assert "and 1 more" in text


def test_error_when_hardly_a_name_fits_says_another_model() -> None:
    other = {f"encoder.{i}.weight": (8, 8) for i in range(20)}
    text = str(does_not_fit(fit(other, shapes_of(make_net())), "model 'model'", "x"))
    assert "likely another model's weights: 0 of 9 names and shapes fit" in text


NAMES = st.lists(st.sampled_from(["a", "b", "module", "_orig_mod"]), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(NAMES, st.just((1,)), max_size=8), st.dictionaries(NAMES, st.just((1,)), max_size=8))
def test_fit_never_uses_a_name_twice_and_accounts_for_every_one(
    found: dict[str, Shape], expected: dict[str, Shape]
) -> None:
    match = fit(found, expected)
    used = list(match.names.values())
    assert len(used) == len(set(used))
    assert set(match.names) | set(match.unexpected) == set(found)
    assert set(used) | set(match.missing) == set(expected)
    assert all(plain_name(f) == plain_name(e) for f, e in match.names.items())
