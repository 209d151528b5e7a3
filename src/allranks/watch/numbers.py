"""Are the numbers of the ranks still right? What their records say of losses and parameters, and when that is worth a look.

A loss that is not finite is told once all ranks are well past that step, so that who was first is known. Replicas are compared
where the same step ended after the same number of collectives; two checks that differ, and none later that does not, make
a look: one alone may be a rank that is about to be given its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from allranks.watch.rows import Row

PATIENCE_S = 3.0
"""How long ranks that do not come past the step are waited for."""


LOOKED_S = 1.2
"""Within this time each rank looks at a loss, how quick its steps may be: LOOKED_NS and LIGHT_EVERY ticks (record/ticking.py)."""
SPREAD_S = 0.5
"""All ranks at the same step: it came from one rank's gradient, whose own note is told first."""


@dataclass
class Numbers:
    """Remembers what was told: each of both once."""

    _has_told_loss: bool = False
    _has_told_drift: bool = False
    _since: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether something was seen that is told in a moment."""
        return self._since is not None and not self._has_told_loss

    def look(self, rows: Mapping[int, Row], now: float) -> tuple[int, ...]:
        """The ranks to look at, or none."""
        bad = {n: r.not_finite_step for n, r in rows.items() if r.not_finite_step}
        if bad:
            return () if self._has_told_loss else self._losses(rows, bad, now)
        if self._has_told_drift or not has_drifted({n: r.checks for n, r in rows.items()}):
            return ()
        self._has_told_drift = True
        return tuple(sorted(rows))

    def last(self, rows: Mapping[int, Row]) -> bool:
        """Whether there is something to say that was not said, now that all ranks have ended."""
        if any(r.not_finite_step for r in rows.values()):
            is_new, self._has_told_loss = not self._has_told_loss, True
            return is_new
        checks = {n: r.checks for n, r in rows.items()}
        has = not self._has_told_drift and (has_drifted(checks) or differs_at_last(checks))
        self._has_told_drift |= has
        return has

    def _losses(self, rows: Mapping[int, Row], bad: Mapping[int, int], now: float) -> tuple[int, ...]:
        self._since = now if self._since is None else self._since
        first = min(bad.values())
        others = [r for n, r in rows.items() if n not in bad and not r.is_over]
        wait_s = LOOKED_S if all(r.step >= first for r in others) else PATIENCE_S
        if not others:
            is_spread = len(bad) > 1 and len(set(bad.values())) == 1
            wait_s = SPREAD_S if is_spread else 0.0
        if now - self._since < wait_s:
            return ()
        self._has_told_loss = True
        return tuple(sorted(bad))


Checks = Mapping[int, tuple[tuple[int, int, int], ...]]
"""By rank, (step, collectives so far, hash) of the newest checks."""


def compared(checks: Checks) -> list[tuple[tuple[int, int], dict[int, int]]]:
    """What more than one rank has checked: ((step, collectives), rank -> hash), oldest first."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for rank, own in checks.items():
        for step, seq, value in own:
            found.setdefault((step, seq), {})[rank] = value
    return sorted((key, by_rank) for key, by_rank in found.items() if len(by_rank) > 1)


def has_drifted(checks: Checks) -> bool:
    """Whether the last two checks that ranks have in common both differ."""
    last = [len(set(by_rank.values())) > 1 for _, by_rank in compared(checks)[-2:]]
    return len(last) == 2 and all(last)


def differs_at_last(checks: Checks) -> bool:
    """Whether the very last check that ranks have in common differs."""
    return any(len(set(by_rank.values())) > 1 for _, by_rank in compared(checks)[-1:])
