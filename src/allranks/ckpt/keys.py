"""Do the weights of a checkpoint fit this model, and if not, why? Names and shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allranks.core.errors import CheckpointError

Shape = tuple[int, ...]
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Fit:
    """How the names of a checkpoint map onto those of a model."""

    names: Mapping[str, str]
    """By name in the checkpoint: the name in the model."""
    missing: tuple[str, ...]
    """Names of the model that the checkpoint does not have."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the model does not have."""
    shapes: tuple[tuple[str, Shape, Shape], ...]
    """(name, shape in the checkpoint, shape in the model)."""
    wrappers: tuple[str, ...]
    """Prefixes by which the names differed: "module." of DDP, "_orig_mod." of torch.compile."""
    num_expected: int
    num_found: int

    @property
    def is_complete(self) -> bool:
        """Whether everything fits."""
        return not (self.missing or self.unexpected or self.shapes)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it: "module._orig_mod.conv.weight" is "conv.weight"."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def fit(found: Mapping[str, Shape], expected: Mapping[str, Shape]) -> Fit:
    """Match the names of a checkpoint with those of a model.

    Names that are equal match; of the others, those that are equal and unique without wrappers' prefixes.

    Args:
        found: Shape by name, in the checkpoint.
        expected: Shape by name, in the model.
    """
    names = {name: name for name in found if name in expected}
    rest_found = _by_plain_name(n for n in found if n not in names)
    rest_expected = _by_plain_name(n for n in expected if n not in names)
    wrappers: set[str] = set()
    for plain, candidates in rest_found.items():
        wanted = rest_expected.get(plain, [])
        if len(candidates) == 1 and len(wanted) == 1:
            names[candidates[0]] = wanted[0]
            both = set(candidates[0].split(".")) ^ set(wanted[0].split("."))
            wrappers |= {f"{part}." for part in both if part in _WRAPPERS}
    taken = set(names.values())
    return Fit(
        names=names,
        missing=tuple(n for n in expected if n not in taken),
        unexpected=tuple(n for n in found if n not in names),
        shapes=tuple((m, found[f], expected[m]) for f, m in names.items() if found[f] != expected[m]),
        wrappers=tuple(sorted(wrappers)),
        num_expected=len(expected),
        num_found=len(found),
    )


def _by_plain_name(names: object) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:  # pyright: ignore[reportGeneralTypeIssues]
        groups.setdefault(plain_name(name), []).append(name)
    return groups


def does_not_fit(fit: Fit, what: str, where: str) -> CheckpointError:
    """The error for weights that do not fit, grouped by cause.

    Args:
        what: The model: "model 'teacher'".
        where: The checkpoint's path.
    """
    same = fit.num_expected - len(fit.missing) - len(fit.shapes)
    groups = []
    if same * 10 < fit.num_expected:
        groups.append(f"likely another model's weights: {same} of {fit.num_expected} names and shapes fit")
    if fit.shapes:
        shown = [f"{n}: {list(f)} in the checkpoint, {list(e)} in the model" for n, f, e in fit.shapes]
        groups.append(_group(f"{len(fit.shapes)} of another shape", shown))
    if fit.missing:
        groups.append(
            _group(
                f"{len(fit.missing)} of {fit.num_expected} missing in the checkpoint", _layers(fit.missing)
            )
        )
    if fit.unexpected:
        groups.append(
            _group(f"{len(fit.unexpected)} of {fit.num_found} not in the model", _layers(fit.unexpected))
        )
    if fit.wrappers:
        groups.append(f"names differ by {' and '.join(fit.wrappers)}: handled, not the cause")
    return CheckpointError(
        "AR605",
        f"{where} does not fit {what}",
        why="".join(f"\n           {g}" for g in groups).lstrip(),
        fix="build the model as it was when it was saved; strict=False loads what fits and leaves the rest as it is",
    )


def _group(title: str, rows: list[str]) -> str:
    more = f", and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"{title}: {'; '.join(rows[:_SHOWN])}{more}"


def _layers(names: tuple[str, ...]) -> list[str]:
    """Names gathered by the layer they lie in: "conv.{weight, bias}"."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, []).append(leaf)
    rows = []
    for layer, leaves in layers.items():
        inner = leaves[0] if len(leaves) == 1 else "{" + ", ".join(leaves) + "}"
        rows.append(f"{layer}.{inner}" if layer else inner)
    return rows
