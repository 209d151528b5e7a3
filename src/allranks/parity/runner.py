"""How are the two runs made that parity compares? The script is started twice by `allranks run`, on many ranks and on one.

Many first: what its DataLoaders were then tells how large the batches on one rank must be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from allranks.core.errors import ResultError
from allranks.parity.causes import Finding
from allranks.parity.compare import Comparison, compare
from allranks.parity.conclude import find_cause
from allranks.parity.options import RecordOptions
from allranks.parity.recording import Recording, read

BOOT = Path(__file__).parent / "boot"
LAUNCH = "import sys; from allranks.cli import main; main(sys.argv[1:])"
LINES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for."""

    script: str
    args: tuple[str, ...] = ()
    num_ranks: int = 2
    launch: tuple[str, ...] = ()
    """More flags for `allranks run`, of the run on many ranks."""
    updates: int = 20
    dropout: bool = True
    autocast: bool = True
    seed: int = 0
    batch_size: Literal["auto", "keep", "scale"] = "auto"
    """What the DataLoaders of a plain script get on one rank; auto: larger batches where there is a DistributedSampler."""
    tolerance: float | None = None
    folder: Path | None = None
    """Where the recordings are kept; a temporary folder if not given."""
    recorded: Path | None = None
    """The run on many ranks, if it is recorded already."""

    @property
    def options(self) -> RecordOptions:
        return RecordOptions(
            updates=self.updates, dropout=self.dropout, autocast=self.autocast, seed=self.seed
        )


@dataclass(slots=True)
class Answer:
    """Both recordings, and what came of comparing them."""

    one: Recording
    many: Recording
    result: Comparison
    finding: Finding | None
    notes: list[str]


def run(wish: Wish, say: Callable[[str], None]) -> Answer:
    """Run the script twice and compare.

    Raises:
        ResultError: AR720 a run made no update, AR721 a run failed and what it recorded shows no difference.
    """
    with _folder(wish) as folder:
        failed, recorded = "", wish.recorded
        if recorded is None:
            recorded = folder / "many"
            say(f"{wish.script} on {wish.num_ranks} ranks ...")
            failed = _record(wish, recorded, wish.num_ranks, wish.options)
        many = _read(recorded, wish.num_ranks, failed)
        say(f"{wish.script} on 1 rank ...")
        alone = replace(wish, launch=())
        failed_alone = _record(alone, folder / "one", 1, _options_of_one(wish, recorded, many))
        one = _read(folder / "one", 1, failed_alone)
        answer = judge(one, many, wish.tolerance)
        for failure in (failed, failed_alone):
            if failure and answer.finding is None:
                raise ResultError(
                    "AR721",
                    f"a run failed after {answer.result.equal_updates} equal updates",
                    why=failure,
                    fix=f"--updates {max(1, answer.result.equal_updates)} compares only what both did",
                )
        return answer


def record(wish: Wish, folder: Path) -> None:
    """Only make the run on many ranks, or this host's part of it.

    Raises:
        ResultError: AR720 it failed.
    """
    if failure := _record(wish, folder, wish.num_ranks, wish.options):
        raise ResultError(
            "AR720", "the run failed", why=failure, fix="allranks run with the same script must train"
        )


def judge(one: Recording, many: Recording, tolerance: float | None = None) -> Answer:
    """Compare two recordings."""
    result = compare(one, many, tolerance)
    return Answer(one, many, result, find_cause(one, many, result), _notes(one, many))


def _options_of_one(wish: Wish, recorded: Path, many: Recording) -> RecordOptions:
    """As the run on many ranks was recorded, with batches as large as all its ranks' together."""
    options = RecordOptions(**json.loads((recorded / "options.json").read_text()))
    if wish.batch_size == "keep":
        return options
    return replace(
        options,
        loaders=many.ranks[0].loaders,
        scale=many.world_size,
        scales_all=wish.batch_size == "scale",
    )


def _notes(one: Recording, many: Recording) -> list[str]:
    notes = []
    for loader in one.ranks[0].loaders:
        if loader["scaled_by"] > 1:
            size = loader["batch_size"]
            notes.append(
                f"the DataLoader at {loader['where']} has batches of {size} on each of {many.world_size} ranks; on 1 rank it was "
                f"given batches of {size * loader['scaled_by']}, so that the global batch is the same (not with --batch-size keep)"
            )
    if many.ranks[0].autocast:
        notes.append(
            f"autocast to {many.ranks[0].autocast}: compared with the tolerance of half precision; --no-autocast is sharper"
        )
    return notes


@contextmanager
def _folder(wish: Wish) -> Iterator[Path]:
    if wish.folder is not None:
        wish.folder.mkdir(parents=True)
        yield wish.folder.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="allranks-parity-") as folder:
        yield Path(folder)


def _record(wish: Wish, folder: Path, num_ranks: int, options: RecordOptions) -> str:
    """One run; the end of its output if it failed, else ""."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.json").write_text(options.as_json())
    number = sum(1 for _ in folder.glob("output*.txt"))  # of the host, where several record into one folder
    output_path = folder / f"output{number}-{os.getpid()}.txt"
    command = [sys.executable, "-c", LAUNCH, "run", "--nproc", str(num_ranks)]
    command += ["--run-dir", str(folder / "run"), *wish.launch]
    with output_path.open("wb") as output:
        done = subprocess.run(
            [*command, wish.script, *wish.args],
            env=environment(folder, options),
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode == 0:
        return ""
    lines = output_path.read_text(errors="replace").strip().splitlines()
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    return f"exit code {done.returncode} on {ranks}:\n" + "\n".join(lines[-LINES_SHOWN:])


def environment(folder: Path, options: RecordOptions) -> dict[str, str]:
    """The variables under which ranks are recorded."""
    path = os.pathsep.join([str(BOOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    recording = {"ALLRANKS_PARITY": str(folder), "ALLRANKS_PARITY_OPTIONS": options.as_json()}
    # The same choice of kernels in both runs, whatever share of the cores a rank gets.
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **recording,
    }


def _read(folder: Path, num_ranks: int, failure: str) -> Recording:
    found = read(folder)
    if found.ranks and len(found.ranks) >= found.ranks[0].world_size and any(r.steps for r in found.ranks):
        return found
    ranks = f"{num_ranks} rank{'s' * (num_ranks != 1)}"
    raise ResultError(
        "AR720",
        f"the script made no update on {ranks}",
        why=failure or "no optimizer.step was called by a process of the job",
        fix=f"allranks run --nproc {num_ranks} with the same script must train",
    )
