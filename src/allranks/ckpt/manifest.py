"""What is a complete checkpoint made of, and how can one tell? manifest.json, written last.

It lists every file with its size and sha256, and ends with the sha256 of its own text before that line, so a changed byte
anywhere in a checkpoint is found:

    {
     "format": "allranks checkpoint",
     "version": 1,
     "step": 1200,
     ...
     "files": {"model.safetensors": {"size": 1234, "sha256": "..."}, ...},
     "checksum": "..."
    }
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from allranks.core.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "allranks checkpoint"
VERSION = 1
_END = re.compile(rb',\n "checksum": "([0-9a-f]{64})"\n\}\n\Z')
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*\Z")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file as it was written."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The whole of a checkpoint, in one value."""

    step: int
    epoch: int = 0
    world_size: int = 1
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    """Versions, git commit, host, time: for people."""


def dump(manifest: Manifest) -> bytes:
    """The text of manifest.json."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "about": dict(manifest.about),
        "files": {n: {"size": f.size, "sha256": f.sha256} for n, f in sorted(manifest.files.items())},
    }
    text = json.dumps(body, indent=1).encode()[: -len(b"\n}")]
    return text + f',\n "checksum": "{hashlib.sha256(text).hexdigest()}"\n}}\n'.encode()


def parse(data: bytes) -> Manifest:
    """Read manifest.json.

    Raises:
        CheckpointError: AR601 it is damaged, AR604 it is of a format this allranks does not know.
    """
    end = _END.search(data)
    if end is None:
        raise CheckpointError(
            "AR601", f"{NAME} is damaged: it does not end with its checksum ({len(data)} bytes)"
        )
    text = data[: end.start()]
    if hashlib.sha256(text).hexdigest().encode() != end.group(1):
        raise CheckpointError("AR601", f"{NAME} is damaged: its text does not match its checksum")
    try:
        body = json.loads(data)
        if body["format"] != FORMAT or body["version"] != VERSION:
            raise CheckpointError(
                "AR604",
                f"{NAME} says {body['format']!r} version {body['version']!r}; this allranks reads {FORMAT!r} version {VERSION}",
                fix="resume with the allranks that wrote it (its version is under 'about'), or a newer one",
            )
        files = {n: FileEntry(int(f["size"]), str(f["sha256"])) for n, f in body["files"].items()}
        manifest = Manifest(
            step=int(body["step"]),
            epoch=int(body["epoch"]),
            world_size=int(body["world_size"]),
            files=files,
            metrics=body["metrics"],
            about=body["about"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "AR601", f"{NAME} is not what allranks writes: {type(error).__name__}: {error}"
        ) from error
    for name in files:
        # A name is a name in this folder: a stranger's manifest must not make us read elsewhere.
        if not _FILE.match(name):
            raise CheckpointError("AR601", f"{NAME} lists the file {name!r}, which is no plain file name")
    return manifest
