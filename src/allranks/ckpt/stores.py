"""Where do checkpoints lie, and what does it take there to write one that cannot be half there?

On a disk: files are written beside the final name, flushed to the disk (fsync), and the folder is renamed. On an object store
(s3://, gs://, any fsspec URL) nothing can be renamed, but an object appears whole or not at all: the manifest, written last, is
what makes a checkpoint one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from allranks.ckpt import manifest
from allranks.ckpt.manifest import FileEntry
from allranks.core.errors import CheckpointError

_BUFFER_BYTES = 1 << 20


class Sink(io.RawIOBase):
    """Counts and hashes what passes through to a file; `entry()` is what a manifest says of it."""

    def __init__(self, write: Any) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, data: Any, /) -> int:
        """Write some of the data; the buffer above writes the rest."""
        view = memoryview(data).cast("B")
        count = self._write(view)
        self._hash.update(view[:count])
        self._size += count
        return count

    def entry(self) -> FileEntry:
        """Size and sha256 so far."""
        return FileEntry(self._size, self._hash.hexdigest())


class Store(Protocol):
    """A folder of checkpoint folders."""

    target: str
    renames: bool

    def folders(self) -> list[str]:
        """Names of the folders; empty if the target is not there yet."""
        ...

    def files(self, folder: str) -> dict[str, int]:
        """Names and sizes of the files of one folder; empty if it is not there."""
        ...

    def make(self, folder: str) -> None:
        """Make a folder, and the target above it."""
        ...

    def create(self, folder: str, name: str) -> Any:
        """A context manager: (file to write to, Sink); the file is durable after it."""
        ...

    def put(self, folder: str, name: str, data: bytes, *, lasting: bool = True) -> None:
        """Write a small file that others see whole or not at all; not `lasting`: who sees it may do away with its folder at once."""
        ...

    def open(self, folder: str, name: str) -> BinaryIO:
        """Open a file for reading."""
        ...

    def publish(self, working: str, final: str) -> None:
        """Give a finished folder its final name, durably; never replaces one that is there."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder, the manifest first, so that it never looks complete and damaged."""
        ...

    def drop(self, folder: str, name: str) -> None:
        """Remove one file if it is there."""
        ...

    def path(self, folder: str, name: str = "") -> str:
        """The name people know it by."""
        ...


class LocalStore:
    """A folder on a disk that all ranks see."""

    renames = True

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self.root = Path(target)
        self.target = str(target)

    def folders(self) -> list[str]:
        return sorted(p.name for p in self.root.iterdir() if p.is_dir()) if self.root.is_dir() else []

    def files(self, folder: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with contextlib.suppress(
            FileNotFoundError, NotADirectoryError
        ):  # the folder is not there, or renamed meanwhile
            for place in (self.root / folder).iterdir():
                # Another rank may rename its .part between the listing and this look.
                with contextlib.suppress(FileNotFoundError):
                    found = place.stat()
                    if stat.S_ISREG(found.st_mode):
                        sizes[place.name] = found.st_size
        return sizes

    def make(self, folder: str) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, folder: str, name: str) -> Iterator[tuple[BinaryIO, Sink]]:
        fd = os.open(self.root / folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            sink = Sink(lambda view: os.write(fd, view))
            file = io.BufferedWriter(sink, _BUFFER_BYTES)
            yield file, sink  # pyright: ignore[reportReturnType] - a BufferedWriter is what people write bytes to
            file.flush()
            os.fsync(fd)
        finally:
            os.close(fd)

    def put(self, folder: str, name: str, data: bytes, *, lasting: bool = True) -> None:
        with self.create(folder, f".{name}.part") as (file, _):
            file.write(data)
        (self.root / folder / f".{name}.part").rename(self.root / folder / name)
        if lasting:
            self._sync_folder(self.root / folder)

    def open(self, folder: str, name: str) -> BinaryIO:
        return (self.root / folder / name).open("rb")

    def publish(self, working: str, final: str) -> None:
        self._sync_folder(self.root / working)
        (self.root / working).rename(self.root / final)
        self._sync_folder(self.root)

    def remove(self, folder: str) -> None:
        place = self.root / folder
        if (place / manifest.NAME).exists():
            (place / manifest.NAME).unlink()
            self._sync_folder(place)
        shutil.rmtree(place, ignore_errors=True)

    def drop(self, folder: str, name: str) -> None:
        (self.root / folder / name).unlink(missing_ok=True)

    def path(self, folder: str, name: str = "") -> str:
        return str(self.root / folder / name)

    def _sync_folder(self, place: Path) -> None:
        # A rename is on the disk only when the folder that holds the name is.
        fd = os.open(place, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class ObjectStore:
    """A prefix in an object store, or anything else fsspec reaches."""

    renames = False

    def __init__(self, target: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            from fsspec.core import url_to_fs

            self._fs, root = url_to_fs(target, **(options or {}))
        except (ImportError, ValueError) as error:
            scheme = target.split("://")[0]
            raise CheckpointError(
                "AR614",
                f"checkpoints cannot go to {target}: {error}",
                why=f"fsspec has no file system for {scheme}:// here",
                fix="pip install 'allranks[s3]'"
                if scheme == "s3"
                else f"install fsspec's package for {scheme}://",
            ) from error
        self._root = str(root).rstrip("/")
        self.target = target.rstrip("/")

    def folders(self) -> list[str]:
        return sorted(self._name(e) for e in self._entries(self._root) if e["type"] == "directory")

    def files(self, folder: str) -> dict[str, int]:
        entries = self._entries(f"{self._root}/{folder}")
        return {self._name(e): int(e["size"]) for e in entries if e["type"] == "file" and self._name(e)}

    def make(self, folder: str) -> None:
        """Nothing: folders of an object store exist by what lies in them."""

    @contextmanager
    def create(self, folder: str, name: str) -> Iterator[tuple[BinaryIO, Sink]]:
        target = self._fs.open(f"{self._root}/{folder}/{name}", "wb")
        try:
            sink = Sink(target.write)
            file = io.BufferedWriter(sink, _BUFFER_BYTES)
            yield file, sink  # pyright: ignore[reportReturnType]
            file.flush()
        except BaseException:
            # Closing would make the torn object visible.
            getattr(target, "discard", lambda: None)()
            raise
        target.close()

    def put(self, folder: str, name: str, data: bytes, *, lasting: bool = True) -> None:
        self._fs.pipe_file(f"{self._root}/{folder}/{name}", data)

    def open(self, folder: str, name: str) -> BinaryIO:
        return self._fs.open(f"{self._root}/{folder}/{name}", "rb")

    def publish(self, working: str, final: str) -> None:
        assert working == final, "an object store has no working names"

    def remove(self, folder: str) -> None:
        place = f"{self._root}/{folder}"
        if self._fs.exists(f"{place}/{manifest.NAME}"):
            self._fs.rm_file(f"{place}/{manifest.NAME}")
        if self._fs.exists(place):
            self._fs.rm(place, recursive=True)
        self._fs.invalidate_cache()

    def drop(self, folder: str, name: str) -> None:
        if self._fs.exists(f"{self._root}/{folder}/{name}"):
            self._fs.rm_file(f"{self._root}/{folder}/{name}")

    def path(self, folder: str, name: str = "") -> str:
        return "/".join(part for part in (self.target, folder, name) if part)

    def _entries(self, place: str) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            return self._fs.ls(place, detail=True)
        except FileNotFoundError:
            return []

    def _name(self, entry: Mapping[str, Any]) -> str:
        return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


def open_store(target: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Store:
    """The store of a path or an fsspec URL.

    Raises:
        CheckpointError: AR614 fsspec knows no such scheme, or its package is missing.
    """
    text = os.fspath(target)
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    return ObjectStore(text, options) if "://" in text else LocalStore(text)
