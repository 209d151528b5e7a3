"""What was chosen for the models of a run, and why? Once in events.jsonl, in the log where something changed, and by run.explain()."""

from __future__ import annotations

import logging
from collections.abc import Callable

from allranks.train.state import RunState
from allranks.wrap import Model
from allranks.wrap.options import LOOK_AT, Choice

logger = logging.getLogger(__name__)


def tell_options(run: RunState, model: Model, choices: list[Choice], event: Callable[..., None]) -> None:
    """Write down DDP's options of a model."""
    event(
        "ddp_options",
        model=model.name,
        options={c.option: c.value for c in choices},
        reasons={c.option: c.reason for c in choices},
        changed=[c.option for c in choices if c.is_changed],
    )
    for choice in choices:
        if choice.is_changed and run.is_rank_zero:
            logger.info("%s: %s=%s: %s", model.name, choice.option, choice.value, choice.reason)


class Explaining(RunState):
    """The part of a run that says what it has chosen."""

    def explain(self) -> str:
        """DDP's options of each model with their reasons, once its first updates were looked at; lines to print. Not collective."""
        lines: list[str] = []
        for model in self.models.values():
            if model.replica is None:
                lines.append(f"{model.name}: not replicated: one rank, or nothing to train")
            elif not model.choices:
                lines.append(f"{model.name}: DDP's options are looked at after {LOOK_AT} updates")
            else:
                lines += [f"{model.name}: {c.option}={c.value}: {c.reason}" for c in model.choices]
        return "\n".join(lines)
