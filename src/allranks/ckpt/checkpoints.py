"""How does a training save as it goes? One object for a folder of checkpoints.

    checkpoints = Checkpoints("runs/digits/checkpoints", keep=3)
    checkpoints.save(Snapshot(step=100, models={"model": net.state_dict()}, training={"optimizer": sgd.state_dict()}))
    ...
    checkpoints.close()

No call here is a collective. With several ranks, every rank makes one of these with the same `session` and saves the same steps.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from allranks.ckpt import finding
from allranks.ckpt.background import Background
from allranks.ckpt.hold import Holder
from allranks.ckpt.plain import CopyTensor, to_plain
from allranks.ckpt.reading import Checkpoint
from allranks.ckpt.retention import Retention
from allranks.ckpt.stores import open_store
from allranks.ckpt.writing import Plan, Snapshot, write_checkpoint
from allranks.core.errors import CheckpointError, UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Session:
    """What all ranks of one attempt must agree on before they save: made on rank 0, given to the others."""

    token: str
    taken: tuple[str, ...]
    """Folders that are there already, so that every rank names a new one alike."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a call of save() cost the loop."""

    folder: str
    held_s: float
    """Seconds the loop was held, the wait for the save before included."""
    waited_s: float


class Checkpoints:
    """Checkpoints in one folder or under one fsspec URL.

    Args:
        target: A path, or a URL such as s3://bucket/run.
        retention: What stays; the newest three if not given.
        rank: This process' rank.
        world_size: Ranks that save together.
        session: Rank 0's `new_session()`; needed where world_size > 1.
        options: For fsspec: {"endpoint_url": ...}.
        wait_for_ranks_s: How long rank 0 waits for the files of the others.
        on_written: Called on rank 0 with folder and step of each finished checkpoint, on the writer's thread.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        retention: Retention | None = None,
        rank: int = 0,
        world_size: int = 1,
        session: Session | None = None,
        options: Mapping[str, Any] | None = None,
        wait_for_ranks_s: float = 300.0,
        on_written: Callable[[str, int], None] | None = None,
    ) -> None:
        self.store = open_store(target, options)
        if session is None and world_size > 1:
            raise UsageError(
                "AR611", f"Checkpoints of {world_size} ranks need rank 0's session", fix="session=..."
            )
        self.session = session or self.new_session()
        self._retention = retention or Retention()
        self._rank, self._world_size = rank, world_size
        self._wait_for_ranks_s = wait_for_ranks_s
        self._on_written = on_written
        self._holder, self._background = Holder(), Background()
        self._copies_at_once = False
        self._taken, self._count = set(self.session.taken), 0
        self._about: dict[str, Any] | None = None

    def new_session(self) -> Session:
        """A new session; on rank 0."""
        return Session(secrets.token_hex(4), tuple(finding.list_folders(self.store)))

    @property
    def is_busy(self) -> bool:
        """Whether a save is being written."""
        return self._background.is_busy

    def save(self, state: Snapshot, *, blocking: bool = False, stays: tuple[str, ...] = ()) -> Saved:
        """Save a state. Not a collective, but every rank must save the same steps in the same order.

        Returns once the state is copied; a background thread writes it. A second save waits for the first.

        Args:
            blocking: Return only when this rank's part is on the disk, on rank 0 when the checkpoint is complete.
            stays: Beginnings of paths, such as "training.optimizers.main.": tensors there are copied while training goes on, until
                `settle()`, before which they must not change. A save of which torch counted a change meanwhile is dropped, with a warning
                (AR619); torch counts no change through `.data` or NumPy.

        Raises:
            CheckpointError: AR606 a value cannot be saved, AR608 the save before (or with `blocking` this one) failed.
        """
        begun = time.perf_counter()
        # The buffers still hold the save before until it is written.
        waited_s = self._background.make_free(f"step {state.step}")
        held = self._hold(state, self._holder.in_place if blocking else self._copying(stays))
        plan = self._plan(state.step)
        go = self._background.run if blocking else self._background.start
        go(plan.final, lambda give_up: self._write(held, plan, give_up))
        if blocking:
            self._background.check()
        return Saved(plan.final, time.perf_counter() - begun, waited_s)

    def _copying(self, stays: tuple[str, ...]) -> CopyTensor:
        if self._copies_at_once or not stays:
            return self._holder.copy
        now, later = self._holder.copy, self._holder.copy_later
        return lambda tensor, path: (later if path.startswith(stays) else now)(tensor, path)

    @property
    def is_settled(self) -> bool:
        """Whether nothing of the state of the last save is still to be copied."""
        return self._holder.is_settled

    def settle(self) -> None:
        """Copy now what the last save left to copy, before it changes; at most the copy of one piece (1 MB) is waited for."""
        self._holder.settle()

    def save_early(self, state: Snapshot, *, wait_for_ranks_s: float) -> None:
        """Save in the background what another save may make unneeded: it may fail, and other ranks may leave it out.

        Args:
            wait_for_ranks_s: How long rank 0 waits for the others.
        """
        self._background.make_free(f"step {state.step}")
        held = self._hold(state, self._holder.copy)
        final = finding.folder_name(state.step, finding.EARLY)
        if final in self.session.taken:
            return
        plan = self._plan_of(final, f"{self.session.token}-early{state.step}", wait_for_ranks_s)
        self._background.start(plan.final, lambda give_up: self._try_write(held, plan, give_up))

    def _try_write(self, held: Snapshot, plan: Plan, give_up: threading.Event) -> None:
        try:
            self._write(held, plan, give_up)
        except CheckpointError as error:
            _log.warning("%s was not saved: %s", plan.final, error.what)

    def prepare(self, state: Snapshot) -> None:
        """Make the buffers for a state of this shape in the background, so that the first save holds the loop no longer than others."""
        self._background.make_free("the buffers")
        self._background.start("the buffers", lambda _: self._hold(state, self._holder.prepare))

    def _write(self, held: Snapshot, plan: Plan, give_up: threading.Event) -> None:
        if changed := self._holder.settle():
            self._copies_at_once = True
            _log.warning(
                "AR619 step %d is not saved: %s was changed before the next update while it was copied; "
                "from now on all is copied before a save lets the training go on",
                held.step,
                changed[0],
            )
            self.store.remove(
                plan.working
            )  # with what other ranks have written by now; the next session clears the rest
            return
        if self._about is None:
            self._about = _about() if self._rank == 0 else {}
        plan = replace(plan, about={**self._about, **plan.about})
        folder = write_checkpoint(self.store, held, plan, give_up)
        if folder is not None and self._on_written is not None:
            self._on_written(folder, held.step)

    def _hold(self, state: Snapshot, copy: CopyTensor) -> Snapshot:
        self._holder.begin()
        is_writer = self._rank == 0
        held = replace(
            state,
            models={n: _weights(m, f"models.{n}", copy) for n, m in state.models.items()}
            if is_writer
            else {},
            training=to_plain(dict(state.training), "training", copy) if is_writer else {},
            this_rank=to_plain(dict(state.this_rank), "this_rank", copy),
            metrics={k: float(v) for k, v in state.metrics.items()},
        )
        self._holder.finish()
        return held

    def _plan(self, step: int) -> Plan:
        again = 0
        while (final := finding.folder_name(step, again)) in self._taken:
            again += 1
        self._taken.add(final)
        self._count += 1
        return self._plan_of(final, f"{self.session.token}-{self._count}", self._wait_for_ranks_s)

    def _plan_of(self, final: str, token: str, wait_for_ranks_s: float) -> Plan:
        return Plan(
            rank=self._rank,
            world_size=self._world_size,
            final=final,
            working=finding.working_name(final, token) if self.store.renames else final,
            token=token,
            wait_for_ranks_s=wait_for_ranks_s,
            retention=self._retention,
            about={"written_at": datetime.now(timezone.utc).isoformat(timespec="seconds")},
        )

    def check(self) -> None:
        """Raise what the last save failed with, once; cheap, for every step.

        Raises:
            CheckpointError: AR608.
        """
        self._background.check()

    def wait(self) -> None:
        """Wait for the save that is being written.

        Raises:
            CheckpointError: AR608 it failed.
        """
        self._background.wait()
        self._background.check()

    def close(self, *, failing: bool = False) -> None:
        """Wait for the last save.

        Args:
            failing: The job is ending with an error: wait no longer for other ranks than a few seconds, and raise nothing.
        """
        if failing:
            self._background.give_up.set()
        self._background.close()
        self._holder.close()
        if not failing:
            self._background.check()

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies; None if none was ever saved.

        Raises:
            CheckpointError: AR600 there are some, and none is good.
        """
        found = finding.find_latest(self.store)
        if found.folder is None or found.manifest is None:
            if not finding.is_only_unfinished(self.store, found.problems):
                raise finding.no_good_checkpoint(self.store, found.problems)
            return None
        return Checkpoint(self.store, found.folder, found.manifest, found.problems)


def _weights(state: Mapping[str, Any], path: str, copy: Any) -> dict[str, Any]:
    return {name: to_plain(value, f"{path}.{name}", copy) for name, value in state.items()}


def save(target: str | os.PathLike[str], state: Snapshot, *, retention: Retention | None = None) -> str:
    """Save a state of one process and wait for it.

    Returns:
        The checkpoint's folder.
    """
    checkpoints = Checkpoints(target, retention=retention)
    saved = checkpoints.save(state, blocking=True)
    return checkpoints.store.path(saved.folder).rstrip("/")


def load(path: str | os.PathLike[str], *, options: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open one checkpoint by its own path, e.g. runs/digits/checkpoints/step-00001200.

    Raises:
        CheckpointError: AR613 there is no such folder, AR601-604 what is wrong with it.
    """
    text = os.fspath(path).rstrip("/")
    parent, _, folder = text.rpartition("/")
    store = open_store(parent or ".", options)
    if not store.files(folder):
        raise CheckpointError(
            "AR613",
            f"there is no checkpoint at {text}",
            fix=f"one of: {', '.join(finding.list_folders(store)[-5:]) or 'nothing is there'}",
        )
    found, problems = finding.verify(store, folder)
    if found is None or problems:
        raise CheckpointError(
            problems[0].code,
            f"{text} cannot be loaded: {problems[0].text}",
            why="; ".join(p.text for p in problems[1:]) or "",
            fix="take the checkpoint before it, or restore this one from a copy",
        )
    return Checkpoint(store, folder, found)


def _about() -> dict[str, Any]:
    """What wrote a checkpoint, for people."""
    about: dict[str, Any] = {
        "allranks": _version("allranks"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "command": " ".join(sys.argv)[:1000],
    }
    commit = _git_commit(Path(sys.argv[0]).resolve().parent)
    return {**about, "git_commit": commit} if commit else about


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _git_commit(folder: Path) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
