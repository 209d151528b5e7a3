"""Which checkpoint is the newest good one, and what is wrong with the others?

There is no pointer to the latest one that could lie: the folders are read, newest step first, and the first that verifies is it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from allranks.ckpt import manifest
from allranks.ckpt.manifest import FileEntry, Manifest
from allranks.ckpt.stores import Store
from allranks.core.errors import CheckpointError

_FOLDER = re.compile(r"step-(\d{8,})(?:-(early)|-again(\d+))?(\.tmp-.*)?\Z")
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one checkpoint."""

    folder: str
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.text} ({self.code})"


@dataclass(frozen=True, slots=True)
class Found:
    """The newest good checkpoint, if there is one, and the newer ones that are not good."""

    folder: str | None
    manifest: Manifest | None
    problems: tuple[Problem, ...] = ()


EARLY = -1


def folder_name(step: int, again: int = 0) -> str:
    """The folder of a step: step-00001200; -again1 where that one is taken, -early for EARLY, which comes before."""
    return f"step-{step:08d}" + ("-early" if again == EARLY else f"-again{again}" if again else "")


def working_name(folder: str, token: str) -> str:
    """The name while it is written."""
    return f"{folder}.tmp-{token}"


def is_working(folder: str) -> bool:
    """Whether a folder is one that was never finished."""
    match = _FOLDER.match(folder)
    return bool(match and match.group(4))


def parse_folder(folder: str) -> tuple[int, int] | None:
    """Step and repetition of a folder's name; None if it is not one of ours."""
    match = _FOLDER.match(folder)
    if match is None:
        return None
    return int(match.group(1)), EARLY if match.group(2) else int(match.group(3) or 0)


def list_folders(store: Store) -> list[str]:
    """Every folder of a checkpoint, finished or not, in the order of their steps."""
    named = [(parse_folder(f), is_working(f), f) for f in store.folders()]
    # Of one step, the unfinished before the finished: the newest good one comes last.
    ours = [(step, not working, folder) for step, working, folder in named if step is not None]
    return [folder for _, _, folder in sorted(ours)]


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: AR601 damaged, AR602 unfinished (no manifest), AR604 unknown format.
    """
    if manifest.NAME not in store.files(folder):
        raise CheckpointError("AR602", f"the save was not finished: there is no {manifest.NAME}")
    try:
        with store.open(folder, manifest.NAME) as file:
            found = manifest.parse(file.read())
    except OSError as error:
        raise CheckpointError("AR601", f"{manifest.NAME} cannot be read: {error}") from error
    step = parse_folder(folder)
    if step is not None and step[0] != found.step:
        raise CheckpointError(
            "AR601", f"{manifest.NAME} is of step {found.step}, in a folder named for step {step[0]}"
        )
    return found


def verify(store: Store, folder: str, *, contents: bool = True) -> tuple[Manifest | None, list[Problem]]:
    """Check a checkpoint against its manifest.

    Args:
        contents: Also read every byte; without it names and sizes only.

    Returns:
        The manifest where it could be read, and all that is wrong.
    """
    try:
        found = read_manifest(store, folder)
    except CheckpointError as error:
        return None, [Problem(folder, error.code, error.what)]
    there = store.files(folder)
    problems = []
    for name, entry in found.files.items():
        wrong = _check_file(store, folder, name, entry, there, contents)
        if wrong is not None:
            problems.append(Problem(folder, *wrong))
    return found, problems


def _check_file(
    store: Store, folder: str, name: str, entry: FileEntry, there: dict[str, int], contents: bool
) -> tuple[str, str] | None:
    if name not in there:
        return "AR603", f"{name} is missing"
    if there[name] != entry.size:
        kind = "truncated" if there[name] < entry.size else "longer than it was written"
        return "AR601", f"{name} is {kind}: {there[name]} of {entry.size} bytes"
    if not contents:
        return None
    digest = hashlib.sha256()
    try:
        with store.open(folder, name) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        return "AR601", f"{name} cannot be read: {error}"
    if digest.hexdigest() != entry.sha256:
        return "AR601", f"{name} is damaged: its bytes do not match the checksum they were written with"
    return None


def find_latest(store: Store) -> Found:
    """The newest checkpoint that verifies; reads as many as it has to, newest first.

    Returns:
        `folder` is None where there is none: nothing was ever saved if `problems` is empty too.
    """
    problems: list[Problem] = []
    for folder in reversed(list_folders(store)):
        if is_working(folder):
            text = "the save was not finished: it still has its working name"
            problems.append(Problem(folder, "AR602", text))
            continue
        found, wrong = verify(store, folder)
        if found is not None and not wrong:
            return Found(folder, found, tuple(problems))
        problems.extend(wrong)
    return Found(None, None, tuple(problems))


def is_only_unfinished(store: Store, problems: tuple[Problem, ...]) -> bool:
    """Whether nothing was ever saved whole: a first save that was cut short is no reason to refuse to begin.

    A folder under its final name without a manifest counts only where that name is also the working name (object stores).
    """
    return all(is_working(p.folder) or (p.code == "AR602" and not store.renames) for p in problems)


def no_good_checkpoint(store: Store, problems: tuple[Problem, ...]) -> CheckpointError:
    """The error for a folder in which every checkpoint is bad: what is wrong with each."""
    lines = "".join(f"\n           {p}" for p in problems)
    return CheckpointError(
        "AR600",
        f"no checkpoint in {store.target} can be resumed from",
        why=f"each was looked at, newest first:{lines}",
        fix='start("...", resume="never") to begin anew, or restore one of these folders from a copy',
    )
