"""Which old checkpoints go, once a new one is complete and verified?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from allranks.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Kept:
    """A complete checkpoint, as retention sees it."""

    folder: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays: the newest `keep`, every step divisible by `keep_every`, and the best by a metric."""

    keep: int | None = 3
    """How many of the newest; None keeps all."""
    keep_every: int | None = None
    """Steps: a checkpoint whose step is a multiple of it stays for good."""
    best: str | None = None
    """A metric given to save(metrics=...): the checkpoint with the best value of it stays too."""
    best_is: Literal["highest", "lowest"] | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(
                    "AR611",
                    f"{name}={value!r}: this would delete the checkpoint just written",
                    fix=f"{name}=1 or more; {name}=None "
                    + ("keeps all" if name == "keep" else "for no such rule"),
                )
        if self.best_is not in (None, "highest", "lowest"):
            raise UsageError(
                "AR611", f"best_is={self.best_is!r}", fix='best_is="highest" or best_is="lowest"'
            )
        if (self.best is None) != (self.best_is is None):
            raise UsageError(
                "AR611",
                f"best={self.best!r} with best_is={self.best_is!r}: both or neither",
                fix='best="accuracy", best_is="highest"',
            )


def to_remove(kept: Sequence[Kept], rule: Retention, newest: str) -> list[str]:
    """Folders that no rule keeps, oldest first; never `newest`.

    Args:
        kept: The complete checkpoints, in the order they were written.
        newest: The one just written and verified.
    """
    if rule.keep is None:
        return []
    stays = {newest, *(k.folder for k in kept[-rule.keep :])}
    if rule.keep_every:
        stays |= {k.folder for k in kept if k.step % rule.keep_every == 0}
    if rule.best:
        with_value = [
            k for k in kept if rule.best in k.metrics and k.metrics[rule.best] == k.metrics[rule.best]
        ]
        if with_value:
            sign = 1 if rule.best_is == "highest" else -1
            # Of equal ones the newest: max() takes the first, so count from the end.
            best = max(reversed(with_value), key=lambda k: sign * k.metrics[rule.best or ""])
            stays.add(best.folder)
    return [k.folder for k in kept if k.folder not in stays]
