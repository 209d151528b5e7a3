"""How is one checkpoint written by many ranks, without a collective?

Every rank writes its own file and, beside it, a slip with its checksum; rank 0 also writes what all ranks share, waits for the
slips of the others, and makes the manifest. So a background thread can do it while the training's collectives go on.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from allranks.ckpt import finding, manifest
from allranks.ckpt.manifest import FileEntry, Manifest
from allranks.ckpt.retention import Kept, Retention, to_remove
from allranks.ckpt.stores import Store
from allranks.ckpt.weights import write_weights
from allranks.core.errors import CheckpointError

_MODEL_NAME = re.compile(r"[A-Za-z0-9_.+-]+\Z")
TRAINING = "training.pt"
_GRACE_S = 5.0
"""How long the other ranks still get once this process is ending: what they began is small, and none of it is worth a hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a training at one update boundary, as values."""

    step: int
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """State dict by model; one named "model" becomes model.safetensors. Only rank 0's is written."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """What is the same on every rank: optimizers, schedulers, progress. Only rank 0's is written."""
    this_rank: Mapping[str, Any] = field(default_factory=dict)
    """What only this rank has: random states."""
    epoch: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """For retention by the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One save, the same on every rank but for `rank`."""

    rank: int
    world_size: int
    final: str
    working: str
    token: str
    wait_for_ranks_s: float
    retention: Retention
    about: Mapping[str, Any]


def rank_file(rank: int) -> str:
    """The file of one rank's own state."""
    return f"rank-{rank}.pt"


def weights_file(name: str) -> str:
    """The file of a model's weights.

    Raises:
        CheckpointError: AR606 the name cannot be part of a file name.
    """
    if not _MODEL_NAME.match(name):
        raise CheckpointError(
            "AR606", f"a model's name {name!r} cannot be part of a file name", fix='name="teacher"'
        )
    return "model.safetensors" if name == "model" else f"model-{name}.safetensors"


def write_checkpoint(store: Store, state: Snapshot, plan: Plan, give_up: threading.Event) -> str | None:
    """Write this rank's part of a checkpoint, and on rank 0 finish it.

    Args:
        state: Plain values only (see `plain.to_plain`).
        give_up: Set by the training when the job is dying: rank 0 stops waiting for the others.

    Returns:
        The checkpoint's folder on rank 0, None on the others.

    Raises:
        CheckpointError: AR609 a rank did not write in time, AR614 the system refused, AR601-603 what was written does not verify.
    """
    try:
        store.make(plan.working)
        if plan.rank != 0:
            own = _write_pt(store, plan.working, rank_file(plan.rank), state.this_rank)
            slip = {"token": plan.token, "size": own.size, "sha256": own.sha256}
            # Rank 0 may give the folder its final name before this call is back.
            store.put(plan.working, _slip(plan.rank), json.dumps(slip).encode(), lasting=False)
            return None
        try:
            files = {rank_file(0): _write_pt(store, plan.working, rank_file(0), state.this_rank)}
            files |= _write_shared(store, plan, state)
            files |= _other_ranks(store, plan, give_up)
            _finish(store, state, plan, files)
        except BaseException:
            # Free the space of a save that failed; one that is killed leaves its folder, which the next session clears.
            store.remove(plan.working)
            raise
        _prune(store, plan)
        return plan.final
    except OSError as error:
        raise CheckpointError(
            "AR614",
            f"step {state.step} cannot be saved to {store.path(plan.final)}: {error.strerror or error}",
            why="the checkpoints before it are untouched",
            fix="free space or grant rights there, then start again with the same command: it resumes",
        ) from error


def _write_pt(store: Store, folder: str, name: str, state: Mapping[str, Any]) -> FileEntry:
    with store.create(folder, name) as (file, sink):
        torch.save(dict(state), file)
    return sink.entry()


def _write_shared(store: Store, plan: Plan, state: Snapshot) -> dict[str, FileEntry]:
    files = {}
    extra: dict[str, dict[str, Any]] = {}
    for name, weights in state.models.items():
        tensors = {k: v for k, v in weights.items() if isinstance(v, torch.Tensor)}
        extra[name] = {k: v for k, v in weights.items() if k not in tensors}
        with store.create(plan.working, weights_file(name)) as (file, sink):
            write_weights(file, tensors, {"format": "pt", "step": str(state.step)})
        files[weights_file(name)] = sink.entry()
    training = {**state.training, "model_extra": extra}
    files[TRAINING] = _write_pt(store, plan.working, TRAINING, training)
    return files


def _slip(rank: int) -> str:
    return f"rank-{rank}.json"


def _other_ranks(store: Store, plan: Plan, give_up: threading.Event) -> dict[str, FileEntry]:
    """Wait for the slips of the other ranks."""
    files: dict[str, FileEntry] = {}
    missing = set(range(1, plan.world_size))
    deadline = time.monotonic() + plan.wait_for_ranks_s
    pause_s = 0.005
    is_ending = False
    while missing:
        there = store.files(plan.working)
        for rank in [r for r in missing if _slip(r) in there]:
            with store.open(plan.working, _slip(rank)) as file:
                slip = json.loads(file.read())
            if slip["token"] == plan.token:
                files[rank_file(rank)] = FileEntry(slip["size"], slip["sha256"])
                missing.discard(rank)
        if not is_ending and (give_up.is_set() or not threading.main_thread().is_alive()):
            is_ending = True
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if missing and time.monotonic() > deadline:
            raise _not_written(store, plan, sorted(missing), gave_up=is_ending)
        if missing:
            time.sleep(pause_s)
            # Object stores charge for each look.
            pause_s = min(pause_s * 1.5, 0.1 if store.renames else 1.0)
    for rank in range(1, plan.world_size):
        store.drop(plan.working, _slip(rank))
    return files


def _not_written(store: Store, plan: Plan, missing: list[int], *, gave_up: bool) -> CheckpointError:
    names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    why = (
        "the job was ending with an error, so rank 0 waited no longer"
        if gave_up
        else "likely that rank died or is slower than the limit, or it does not see the same folder (a disk of its own node)"
    )
    return CheckpointError(
        "AR609",
        f"{names} of {plan.world_size} did not write their part of {store.path(plan.final)} "
        f"within {plan.wait_for_ranks_s:g} s",
        why=why,
        fix="a run directory on a file system that all nodes share, or an s3:// URL",
    )


def _finish(store: Store, state: Snapshot, plan: Plan, files: Mapping[str, FileEntry]) -> None:
    whole = Manifest(
        step=state.step,
        epoch=state.epoch,
        world_size=plan.world_size,
        files=files,
        metrics=state.metrics,
        about=plan.about,
    )
    store.put(plan.working, manifest.NAME, manifest.dump(whole))
    store.publish(plan.working, plan.final)


def _prune(store: Store, plan: Plan) -> None:
    """Verify the new checkpoint, and only then remove what no rule keeps, and what was never finished."""
    # Object stores check what they take; reading all of it back over the network would double the cost.
    _, problems = finding.verify(store, plan.final, contents=store.renames)
    if problems:
        raise CheckpointError(
            problems[0].code,
            f"the checkpoint just written does not verify: {problems[0]}",
            why="a disk that loses writes, or something else changes the folder; older checkpoints were kept",
            fix=f"check the disk of {store.target}",
        )
    kept: list[Kept] = []
    for folder in finding.list_folders(store):
        if finding.is_working(folder):
            if plan.token.split("-")[0] not in folder:
                store.remove(folder)
            continue
        try:
            found = finding.read_manifest(store, folder)
        except CheckpointError:
            continue  # damaged ones are evidence, and cost nothing but space
        kept.append(Kept(folder, found.step, found.metrics))
    for folder in to_remove(kept, plan.retention, plan.final):
        store.remove(folder)
