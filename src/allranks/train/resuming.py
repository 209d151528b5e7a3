"""From what does a run go on, and do all ranks see it?"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from allranks import ckpt
from allranks.ckpt import Checkpoint, Checkpoints, Retention
from allranks.comm import values
from allranks.core.errors import AllranksError, CheckpointError, UsageError
from allranks.record.rundir import RunDir
from allranks.record.values import Phase
from allranks.train import snapshot
from allranks.train.state import RunState

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Attribute caches of NFS keep a new folder from another host's eyes for 3 to 5 s, 30 s at worst as it is usually mounted.
_SEEN_WITHIN_S = 35.0


class Resuming(RunState):
    """The part of a run that finds its checkpoint and goes on from it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.resume_from: str = "auto"
        self._target: str | os.PathLike[str] = self.run_dir / "checkpoints"
        self._target_options: Mapping[str, Any] | None = None
        self._retention = Retention()
        self._tracked: dict[str, Any] = {}
        self._tracked_per_rank: dict[str, Any] = {}
        self._checkpoints: Checkpoints | None = None
        self._found: Checkpoint | None = None
        self._has_begun = False

    def track(self, *, per_rank: bool = False, **objects: Any) -> None:
        """Save and restore these objects too: anything with state_dict and load_state_dict. Before the first epoch.

        Args:
            per_rank: Each rank's is its own; otherwise rank 0's counts for all.
            objects: By the name to save them under, the same on every rank.

        Raises:
            UsageError: AR624 an object without these methods, a name twice, or too late.
        """
        self._require_open("track")
        for name, thing in objects.items():
            missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(thing, m, None))]
            if missing:
                raise UsageError(
                    "AR624",
                    f"run.track({name}=...): a {type(thing).__name__} has no {missing[0]}()",
                    fix="give it state_dict() that returns plain values, and load_state_dict(state)",
                )
            if name in self._tracked or name in self._tracked_per_rank:
                raise UsageError("AR624", f"run.track({name}=...) was called before", fix="another name")
            if self._has_begun:
                raise UsageError(
                    "AR624",
                    f"run.track({name}=...) after the training has begun: its state would not come back",
                    fix="call it before run.epochs",
                )
            (self._tracked_per_rank if per_rank else self._tracked)[name] = thing

    def resume(self, *, strict: bool = True) -> Checkpoint | None:
        """Go on from the newest good checkpoint, if there is one. **Collective**. run.epochs does it by itself.

        Call it where the loop does not go through run.epochs, or for strict=False; after everything is registered.

        Args:
            strict: Everything must fit; otherwise what fits is taken, and the rest is said.

        Returns:
            The checkpoint; None if the run begins anew.

        Raises:
            CheckpointError: AR600 there are checkpoints and none is good, AR605 to AR618 what does not fit, AR610 a rank does not see
                the folder, AR613 there is nothing at the path of start(resume=...).
        """
        self._require_open("resume")
        if self._has_begun:
            return self._found
        if self.updates:
            raise UsageError(
                "AR620", f"run.resume after {self.updates} updates", fix="call it before the first step"
            )
        self._record.phase(Phase.CHECKPOINT)
        try:
            found = self._agree_on_checkpoint(self._open_checkpoints())
            if found is not None:
                progress = snapshot.put(self, found, self._tracked, self._tracked_per_rank, strict=strict)
                self._resumed_at = found.manifest.step
                cut = 0
                # Lines of another run, or of a checkpoint from before lines were counted, say nothing about this one's.
                if self.is_rank_zero and found.store is self._open_checkpoints().store:
                    cut = snapshot.take_back_lines(self, progress.get("logged", sys.maxsize))
                self._say_resumed(found, cut)
        finally:
            self._record.leave()
        self._found = found
        self._begin()
        return found

    def _begin(self) -> None:
        """From here on the run may save."""
        self._has_begun = True

    def _refuse_beside_checkpoints(self) -> None:
        """After a first update without resume(): a restart that does not resume would begin anew over the work of before."""
        if self.resume_from != "never" and (
            there := ckpt.list_folders(ckpt.open_store(self._target, self._target_options))
        ):
            raise UsageError(
                "AR620",
                f"training began at update 0, beside {there[-1]} in {self._target}",
                why="this loop does not go through run.epochs, and run.resume was not called: a restart is not a resume",
                fix='run.resume() before the loop, or start(resume="never") to begin anew',
            )

    # -- the folder --------------------------------------------------------------------------------------------------------------

    def _open_checkpoints(self) -> Checkpoints:
        """The checkpoints, with a session that all ranks share. Collective the first time."""
        if self._checkpoints is None:
            opened = self._on_rank_zero(
                lambda: Checkpoints(self._target, options=self._target_options).session
            )
            self._checkpoints = Checkpoints(
                self._target,
                retention=self._retention,
                rank=self.rank,
                world_size=self.world_size,
                session=opened,
                options=self._target_options,
                on_written=self._note_written,
            )
            if self.world_size > 1:
                self._require_shared(self._checkpoints)
        return self._checkpoints

    def _on_rank_zero(self, work: Callable[[], T]) -> T:
        """What rank 0's work gives, on every rank; its error is every rank's. Collective."""
        result, error = None, None
        if self.is_rank_zero:
            try:
                result = work()
            except AllranksError as raised:
                error = raised
            except OSError as raised:
                error = CheckpointError(
                    "AR614",
                    f"{self._target} cannot be read or written: {raised.strerror or raised}",
                    fix="grant rights there, or another run directory",
                )
        result, error = values.from_rank_zero((result, error))
        if error is not None:
            raise error
        return result  # pyright: ignore[reportReturnType]

    def _require_shared(self, checkpoints: Checkpoints) -> None:
        """Every rank must see what rank 0 writes: found out now, and not by the first save that is lost. Collective."""
        store, name = checkpoints.store, f"seen-{checkpoints.session.token}"
        self._on_rank_zero(lambda: (store.make(name), store.put(name, "rank-0", b"here"))[1])
        deadline = time.monotonic() + _SEEN_WITHIN_S
        while (
            not (seen := bool(store.files(name))) and time.monotonic() < deadline and _may_come(store.target)
        ):
            time.sleep(0.1)
        rows = values.gather_objects((self.place.host, seen))
        if self.is_rank_zero:
            store.remove(name)
        blind = [f"rank {r} on {host}" for r, (host, ok) in enumerate(rows) if not ok]
        if blind:
            raise CheckpointError(
                "AR610",
                f"{', '.join(blind)} do{'es' * (len(blind) == 1)} not see what rank 0 on {rows[0][0]} writes to {store.target}",
                why="likely it is on a disk that each node has for itself",
                fix="a run directory on a file system that all nodes share, or run.save_every(target='s3://...')",
            )

    def _note_written(self, folder: str, step: int) -> None:
        """Rank 0's writer has finished a checkpoint; on its thread."""
        self._event("checkpoint", step=step, folder=folder)

    def _event(self, kind: str, **fields: Any) -> None:
        """A line of RUN/events.jsonl, from rank 0; a folder that cannot be written costs the line, not the run."""
        if not self.is_rank_zero:
            return
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            RunDir(self.run_dir).append_event(kind, **fields)
        except OSError as error:
            logger.warning("%s: no event %r was written: %s", self.run_dir, kind, error)

    # -- which one ---------------------------------------------------------------------------------------------------------------

    def _agree_on_checkpoint(self, checkpoints: Checkpoints) -> Checkpoint | None:
        """Rank 0 looks and verifies, all ranks take what it found. Collective."""
        if self.resume_from == "never":
            return None
        told = self._on_rank_zero(lambda: _described(self._look(checkpoints)))
        if told is None:
            return None
        target, folder, manifest, passed_over = told
        store = checkpoints.store
        if target != store.target:
            store = ckpt.open_store(target, self._target_options)
        return Checkpoint(store, folder, manifest, passed_over)

    def _look(self, checkpoints: Checkpoints) -> Checkpoint | None:
        found = checkpoints.latest()
        if found is not None or self.resume_from == "auto":
            return found
        return find_to_resume(self.resume_from, self._target_options)

    def _say_resumed(self, found: Checkpoint, lines_cut: int) -> None:
        if not self.is_rank_zero:
            return
        for problem in found.passed_over:
            logger.warning("checkpoint passed over: %s", problem)
        logger.info("resumed from %s: update %d, epoch %d", found.path, self.updates, self.epoch)
        self._event(
            "resume",
            step=self.updates,
            epoch=self.epoch,
            path=found.path,
            world_size=found.manifest.world_size,
            passed_over=[str(p) for p in found.passed_over],
            lines_cut=lines_cut,
        )


def _described(found: Checkpoint | None) -> tuple[Any, ...] | None:
    return (
        (found.store.target, found.folder, found.manifest, found.passed_over) if found is not None else None
    )


def _may_come(target: str) -> bool:
    # On a disk of this host what is not there now will not come; only network file systems are late.
    return "://" in target or _is_network_file_system(Path(target))


def _is_network_file_system(path: Path) -> bool:
    best, kind = "", ""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return True
    resolved = str(path.resolve())
    for line in mounts:
        _, place, fs = line.split()[:3]
        if (resolved + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best):
            best, kind = place, fs
    return kind not in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "ext3", "zfs")


def find_to_resume(path: str, options: Mapping[str, Any] | None = None) -> Checkpoint:
    """The checkpoint that start(resume=path) means: a step's folder, a folder of such, or a run directory.

    Raises:
        CheckpointError: AR613 there is none, AR600 to AR604 what is wrong with it.
    """
    path = path.rstrip("/")
    if ckpt.parse_folder(path.rsplit("/", 1)[-1]) is not None:
        return ckpt.load(path, options=options)
    for target in (f"{path}/checkpoints", path):
        found = Checkpoints(target, options=options).latest()
        if found is not None:
            return found
    raise CheckpointError(
        "AR613",
        f"there is no checkpoint at {path}",
        why=f"neither {path} nor {path}/checkpoints has a folder such as step-00001200",
        fix='resume="auto" to begin anew or go on in the run directory',
    )
