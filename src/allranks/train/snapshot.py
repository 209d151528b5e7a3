"""What of a run goes into a checkpoint, and how does it come back?

What all ranks share is written by rank 0; each rank adds its own random states and the positions of its loaders.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from allranks import ckpt
from allranks.ckpt import Checkpoint, Snapshot
from allranks.core.errors import CheckpointError
from allranks.core.seeds import derive_seed
from allranks.metrics.sinks import METRICS, JsonLines, count_lines, cut_lines
from allranks.train import kernels, sending
from allranks.train.slots import OptimizerSlot
from allranks.train.state import RunState, seed_generators
from allranks.wrap import plain

logger = logging.getLogger(__name__)

# State of these names has its parameter's shape in every optimizer of torch.
_PARAMETER_SHAPED = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")


def take(
    run: RunState, tracked: Mapping[str, Any], per_rank: Mapping[str, Any], metrics: Mapping[str, float]
) -> Snapshot:
    """The state of a run between two updates. Not collective; tensors are references, not copies."""
    stepper = run._stepper
    loaders = {name: loader.state_dict() for name, loader in run.loaders.items()}
    shared = {
        "progress": {"epoch": run.epoch, "seed": run.seed, "logged": _logged(run)},
        "optimizers": {name: slot.optimizer.state_dict() for name, slot in run.slots.items()},
        "schedulers": {name: _schedulers(slot) for name, slot in run.slots.items()},
        "slots": {name: _counters(slot) for name, slot in run.slots.items()},
        "scaler": run.precision.scaler.state_dict() if run.precision.scaler is not None else None,
        "emas": {name: ema.state_dict() for name, ema in run.emas.items()},
        "tracked": {name: thing.state_dict() for name, thing in tracked.items()},
        "loaders": loaders,
        "buffers": {name: list(model.buffers_sync.changing) for name, model in run.models.items()},
        "some_unused": dict(stepper.some_unused),
        "local": sending.take_shared(run),
    }
    mine = {
        "random": ckpt.random_states(run.device),
        "loaders": loaders,
        "tracked": {name: thing.state_dict() for name, thing in per_rank.items()},
        **sending.take_own(run),
    }
    return Snapshot(
        step=run.updates,
        epoch=run.epoch,
        models={name: _weights(model.state_dict()) for name, model in run.models.items()},
        training=shared,
        this_rank=mine,
        metrics=metrics,
    )


def _logged(run: RunState) -> int:
    """Lines of metrics.jsonl so far; rank 0 alone writes it, and what all ranks share."""
    if not run.is_rank_zero:
        return 0
    lines = next((s for s in run._sinks or () if isinstance(s, JsonLines)), None)
    return lines.count if lines is not None else count_lines(run.run_dir / METRICS)


def take_back_lines(run: RunState, logged: int) -> int:
    """Cut what was logged after the checkpoint: it is logged again. How many lines that was."""
    lines = next((s for s in run._sinks or () if isinstance(s, JsonLines)), None)
    try:
        return lines.cut_back(logged) if lines is not None else cut_lines(run.run_dir / METRICS, logged)
    except OSError as error:
        logger.warning("%s still tells of updates that are done again: %s", run.run_dir / METRICS, error)
        return 0


def _weights(state: Mapping[str, Any]) -> dict[str, Any]:
    # torch.compile of a part leaves its mark in the names; nobody names a layer so.
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def _schedulers(slot: OptimizerSlot) -> dict[str, list[Any]]:
    return {
        "update": [s.state_dict() for s in slot.per_update],
        "epoch": [s.state_dict() for s in slot.per_epoch],
    }


def _counters(slot: OptimizerSlot) -> dict[str, Any]:
    return {"updates": slot.updates, "weighted": slot.weighted, "last_pooled": sorted(slot.last_pooled)}


def put(
    run: RunState,
    found: Checkpoint,
    tracked: Mapping[str, Any],
    per_rank: Mapping[str, Any],
    *,
    strict: bool = True,
) -> Mapping[str, Any]:
    """Make the run what it was when the checkpoint was saved. Not collective; every rank reads what it needs.

    Returns:
        What the checkpoint says of the progress.

    Raises:
        CheckpointError: AR605 weights do not fit, AR612 other parts do not, AR607 code would have to run, AR618 a generator.
    """
    shared = found.training()
    same_ranks = found.manifest.world_size == run.world_size
    mine = found.rank(run.rank) if same_ranks else None
    _require_same_parts(run, found, shared, tracked, strict)
    for name, model in run.models.items():
        if name in found.model_names():
            weights = {**found.weights(name), **shared["model_extra"].get(name, {})}
            ckpt.put_weights(plain(model), weights, f"model {name!r}", found.path, strict=strict)
            model.buffers_sync.changing = list(shared["buffers"].get(name, ()))
    for name, slot in run.slots.items():
        if name in shared["optimizers"]:
            # Where ranks train apart, each has a state of its own.
            state = (mine or {}).get("optimizers", shared["optimizers"])[name]
            _put_optimizer(slot, state, found.path)
            _put_slot(slot, shared["schedulers"][name], shared["slots"][name], found.path)
    if run.precision.scaler is not None and shared["scaler"] is not None:
        run.precision.scaler.load_state_dict(shared["scaler"])
    for name, ema in run.emas.items():
        if name in shared["emas"]:
            _load(ema, shared["emas"][name], f"the average {name!r}", found.path)
    for name, thing in tracked.items():
        if name in shared["tracked"]:
            _load(thing, shared["tracked"][name], f"run.track({name}=...)", found.path)
    _put_loaders(run, mine["loaders"] if mine is not None else shared["loaders"])
    run._stepper.some_unused.update(shared["some_unused"])
    sending.put(run, shared, mine)
    run.epoch = shared["progress"]["epoch"]
    _put_own(run, found, mine, per_rank, strict)
    return shared["progress"]


def _require_same_parts(
    run: RunState, found: Checkpoint, shared: Mapping[str, Any], tracked: Mapping[str, Any], strict: bool
) -> None:
    """What the script registers must be what the checkpoint has: a part left out would begin anew in silence."""
    kinds = (
        ("models", found.model_names(), run.models, "run.model(..., name=...)"),
        ("optimizers", shared["optimizers"], run.slots, "run.optimizer(..., name=...)"),
        ("averages", shared["emas"], run.emas, "run.ema(..., name=...)"),
        ("tracked objects", shared["tracked"], tracked, "run.track(name=...)"),
        ("loaders", shared["loaders"], run.loaders, "run.loader(..., name=...)"),
        ("loss scalers", ["fp16"] * (shared["scaler"] is not None), ["fp16"] * (run.precision.scaler is not None), "precision"),
    )  # fmt: skip
    groups, fixes = [], []
    for kind, theirs, ours, call in kinds:
        lost, new = [n for n in theirs if n not in ours], [n for n in ours if n not in theirs]
        if lost:
            groups.append(f"{kind} in the checkpoint that this script has not registered: {', '.join(lost)}")
        if new:
            groups.append(f"{kind} of this script that the checkpoint does not have: {', '.join(new)}")
        if lost or new:
            fixes.append(call)
    if not groups:
        return
    error = CheckpointError(
        "AR612",
        f"{found.path} holds other parts than this script",
        why="".join(f"\n           {g}" for g in groups),
        fix=f"register them before the first epoch, under the names they were saved with: {', '.join(fixes)}; "
        "run.resume(strict=False) takes what is there",
    )
    if strict:
        raise error
    logger.warning("%s; taking what is there, as strict=False says:%s", error.what, error.why)


def _load(thing: Any, state: Any, what: str, path: str) -> None:
    try:
        thing.load_state_dict(state)
    except CheckpointError:
        raise
    except (ValueError, KeyError, RuntimeError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            "AR612",
            f"{what} does not take its state from {path}",
            why=f"{type(error).__name__}: {error}",
            fix="build it as it was when it was saved",
        ) from error


def _put_optimizer(slot: OptimizerSlot, state: Mapping[str, Any], path: str) -> None:
    theirs = [len(group["params"]) for group in state["param_groups"]]
    ours = [len(group["params"]) for group in slot.optimizer.param_groups]
    if theirs != ours:
        raise CheckpointError(
            "AR612",
            f"optimizer {slot.name!r} of {path} has parameter groups of {theirs} parameters, this one of {ours}",
            fix="build the optimizer over the same parameters, in the same groups",
        )
    for index, parameter in enumerate(slot.parameters()):
        for key, value in state["state"].get(index, {}).items():
            if key in _PARAMETER_SHAPED and getattr(value, "shape", parameter.shape) != parameter.shape:
                raise CheckpointError(
                    "AR612",
                    f"optimizer {slot.name!r} of {path}: {key} of parameter {index} has shape {list(value.shape)}, "
                    f"the parameter {list(parameter.shape)}",
                    fix="the same parameters in the same order as when it was saved",
                )
    present = kernels.with_present_form(slot.optimizer, state)
    _load(slot.optimizer, present, f"optimizer {slot.name!r}", path)


def _put_slot(
    slot: OptimizerSlot, schedulers: Mapping[str, list[Any]], counters: Mapping[str, Any], path: str
) -> None:
    for per, ours in (("update", slot.per_update), ("epoch", slot.per_epoch)):
        theirs = schedulers[per]
        if len(theirs) != len(ours):
            raise CheckpointError(
                "AR612",
                f"optimizer {slot.name!r} of {path} has {len(theirs)} schedulers per {per}, this script {len(ours)}",
                fix=f"run.scheduler(..., per={per!r}) for the same ones before the first epoch",
            )
        for scheduler, state in zip(ours, theirs, strict=True):
            _load(scheduler, state, f"{type(scheduler).__name__} of {slot.name!r}", path)
    slot.updates, slot.weighted = counters["updates"], counters["weighted"]
    slot.last_pooled = frozenset(counters["last_pooled"])
    if slot.updates:
        # torch's note that step() came before the scheduler's: it did, before the save; without it torch warns where the code after
        # the last update of an epoch is what a resumed run does first.
        slot.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def _put_loaders(run: RunState, states: Mapping[str, Any]) -> None:
    for name, loader in run.loaders.items():
        if (state := states.get(name)) is None:
            continue
        if not loader.is_training and (state["batch"] or state["micro"]):
            # Between updates no evaluation is half done: the next one is a new pass from the start.
            state = {**state, "pass": state["pass"] + 1, "batch": 0, "micro": 0}
            state.pop("data_set", None)
        loader.load_state_dict(state)


def _put_own(
    run: RunState,
    found: Checkpoint,
    mine: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any],
    strict: bool,
) -> None:
    """This rank's own state; where there were more or fewer ranks, new random streams."""
    run._is_seeded_per_rank = True
    if mine is not None:
        for name, thing in per_rank.items():
            if name in mine["tracked"]:
                _load(thing, mine["tracked"][name], f"run.track({name}=...)", found.path)
        ckpt.restore_random_states(mine["random"], run.device)
        return
    then, now = found.manifest.world_size, run.world_size
    if per_rank and strict:
        raise CheckpointError(
            "AR612",
            f"run.track(per_rank=True, {next(iter(per_rank))}=...) has one state per rank, and {found.path} was saved by "
            f"{then} ranks, these are {now}",
            fix="run.resume(strict=False) leaves these objects as they were made",
        )
    seed_generators(derive_seed(run.seed, "rank", run.rank, "resumed at", found.manifest.step, "on", now))
    if run.is_rank_zero:
        logger.info(
            "AR615 saved by %d rank%s, resumed on %d: the sequence of global batches goes on where it was; dropout and other "
            "randomness of each rank begins new streams, derived from the seed, the rank and step %d",
            then,
            "s" * (then != 1),
            now,
            found.manifest.step,
        )
