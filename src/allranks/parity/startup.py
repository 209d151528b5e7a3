"""What happens in a rank that parity records, before the user's script? Calls are listened to as torch and allranks are imported."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType

from allranks.parity.options import RecordOptions
from allranks.record.imports import AfterImport


def begin(folder: str, options: str) -> None:
    """Record this process into `folder`, if it is a rank's first; otherwise do nothing."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", "1"))
    if (Path(folder) / f"rank{rank}.jsonl").exists():
        return
    begin_in_process(Path(folder), RecordOptions(**json.loads(options)), rank, world_size)


def begin_in_process(folder: Path, options: RecordOptions, rank: int, world_size: int) -> None:
    """Listen from now on; modules that are imported already are listened to at once."""
    hook = AfterImport()

    def torch_is_here(module: ModuleType) -> None:
        from allranks.parity import listening

        recorder = listening.begin(folder, options, rank, world_size)
        if recorder is None:
            return
        library = AfterImport()
        library.after["allranks.data.loader"] = lambda module: listening.to_rank_loaders(module, recorder)
        library.after["allranks.train.run"] = lambda module: listening.to_runs(module, recorder)
        library.after["allranks.train.start"] = lambda module: listening.to_start(module, folder)
        library.install()

    hook.after["torch"] = torch_is_here
    hook.install()
