"""What of a run has to do with how ranks send: what is said of it once, and what of it goes into a checkpoint?"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from allranks.train.state import RunState
from allranks.wrap import Model
from allranks.wrap.choosing import Choice
from allranks.wrap.settings import WHAT_CHANGES, CompressSettings, LocalSettings

logger = logging.getLogger(__name__)


def announce(
    run: RunState,
    model: Model,
    compress: CompressSettings,
    local: LocalSettings,
    event: Callable[..., None],
) -> None:
    """Say what a model's settings change in the training, once, in the log and in events.jsonl."""
    exchange = model.exchange
    if exchange is not None and compress.method in WHAT_CHANGES:
        changes = WHAT_CHANGES[compress.method]
        if run.is_rank_zero:
            logger.info("%s: compress=%r: %s", model.name, compress.method, changes)
        event("compress", model=model.name, method=compress.method, changes=changes)
    if exchange is not None and exchange.chooser is not None:
        model.on_choice = lambda choice: _tell_choice(run, model, choice, event)
    if model.local_steps is not None:
        outer = (
            f", then {local.outer_optimizer} with lr {local.outer_lr:g} and momentum {local.outer_momentum:g}"
            if local.outer_optimizer
            else ""
        )
        changes = (
            f"ranks train apart, and take the mean of their weights after every {local.every} updates{outer}"
        )
        if run.is_rank_zero:
            logger.info("%s: sync_every=%d: %s", model.name, local.every, changes)
        event("local", model=model.name, sync_every=local.every, changes=changes)


def _tell_choice(run: RunState, model: Model, choice: Choice, event: Callable[..., None]) -> None:
    if not run.is_rank_zero:
        return  # and a rank that leaves the network to another has not seen the link
    changes = WHAT_CHANGES.get(choice.method, "nothing is lost")
    logger.info("%s: compress='auto' takes %s (%s)", model.name, choice.text(), changes)
    link = choice.link
    event(
        "compress",
        model=model.name,
        method=choice.method,
        chosen_from={name: round(seconds, 6) for name, seconds in choice.measured_s.items()},
        predicted={name: round(seconds, 6) for name, seconds in choice.predicted_s.items()},
        delay_s=round(link.delay_s, 6) if link is not None else None,
        bytes_per_s=round(link.bytes_per_s) if link is not None else None,
    )


@contextlib.contextmanager
def averaged(models: Mapping[str, Model]) -> Iterator[None]:
    """The mean of the ranks' weights in models whose ranks are apart, for the block. **Collective** if there are any."""
    with contextlib.ExitStack() as stack:
        for model in models.values():
            if model.local_steps is not None:
                stack.enter_context(model.local_steps.averaged())
        yield


def take_shared(run: RunState) -> dict[str, Any]:
    """What all ranks hold alike."""
    return {name: m.local_steps.state_dict() for name, m in run.models.items() if m.local_steps is not None}


def take_own(run: RunState) -> dict[str, Any]:
    """What this rank alone holds; empty where ranks hold nothing of their own."""
    own: dict[str, Any] = {}
    for name, model in run.models.items():
        if model.exchange is not None:
            own.setdefault("exchanges", {})[name] = model.exchange.state_dict()
        if model.local_steps is not None:
            if model.is_apart:
                own.setdefault("apart", {})[name] = model.local_steps.own_weights()
            own["optimizers"] = {n: slot.optimizer.state_dict() for n, slot in run.slots.items()}
    return own


def put(run: RunState, shared: Mapping[str, Any], mine: Mapping[str, Any] | None) -> None:
    """Go on from these, after the models have their weights. Not collective."""
    for name, model in run.models.items():
        if model.local_steps is not None:
            state = shared.get("local", {}).get(name)
            if state is not None:
                is_apart = state["updates"] > 0
                own = mine.get("apart", {}).get(name) if mine is not None else None
                if not is_apart and mine is not None:
                    own = model.local_steps.own_weights()
                model.local_steps.load_state_dict(state, own)
        if model.exchange is not None and mine is not None and name in mine.get("exchanges", {}):
            model.exchange.load_state_dict(mine["exchanges"][name])
