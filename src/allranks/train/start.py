"""Where am I, and with whom? start() answers, joins the ranks, and leaves nothing behind at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from allranks import record
from allranks.comm import values
from allranks.comm.devices import pick_device
from allranks.comm.joining import join
from allranks.comm.membership import Membership
from allranks.comm.parting import part
from allranks.comm.threads import share_threads
from allranks.core.cores import affinity, own_share
from allranks.core.errors import StartError, UsageError
from allranks.core.heap import keep_freed_memory
from allranks.core.overrides import is_overridden, overridden, trial_folder
from allranks.core.place import Place, find_place
from allranks.metrics import Sink, default_sinks
from allranks.metrics.sinks import check_sinks
from allranks.record.notes import note
from allranks.record.rundir import RunDir
from allranks.train.run import Run
from allranks.train.state import seed_generators
from allranks.wrap.precision import Precision, use_deterministic, use_tf32

logger = logging.getLogger(__name__)

_open_runs: list[Run] = []


@contextlib.contextmanager
def start(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    global_batch_size: int | None = None,
    accumulation_steps: int = 1,
    micro_batch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    device: str | torch.device | None = None,
    backend: str | None = None,
    start_timeout_s: float = 300.0,
    timeout_s: float = 600.0,
    threads: int | None = None,
    tf32: bool | None = None,
    deterministic: bool | None = None,
    tensorboard: bool | None = None,
    sinks: tuple[Sink, ...] = (),
    resume: str | os.PathLike[str] = "auto",
) -> Iterator[Run]:
    """Join the ranks of this job, or be alone, for the block. **Collective**: all ranks enter and leave it.

    Works under allranks run, torchrun, srun, mpirun and plain python; the launcher is found from its variables (core/place.py).

    Args:
        run_dir: Folder for metrics and checkpoints, the same on all ranks; the launcher's if not given, else runs/<script>-<date>-<time>.
        global_batch_size: Samples per update over all ranks, the same whatever the number of ranks; each loader may say its own.
        accumulation_steps: Micro-batches per update.
        micro_batch_size: Instead: most samples of a rank in one forward; the micro-batches per update follow from it.
        precision: "fp32", "bf16" or "fp16": autocast in forwards, float32 weights.
        seed: The same initial weights, data order and augmentation on any number of ranks; dropout differs per rank.
        device: This rank's device; cuda:LOCAL_RANK if there are GPUs, else the CPU.
        backend: torch's name of a backend; NCCL with Gloo beside it for CUDA, else Gloo.
        start_timeout_s: Seconds until ranks that have not arrived are named in an error.
        timeout_s: Seconds a collective may take; work of rank 0 alone goes into run.rank_zero_first, which may take longer.
        threads: Intra-op threads on a CPU; the usable cores divided among the local ranks if not given.
        tf32: True lets float32 products on GPUs keep 10 mantissa bits (up to 8 x faster); None leaves torch's setting.
        deterministic: True allows only algorithms that repeat bit for bit; slower on GPUs; None leaves torch's setting.
        tensorboard: Write TensorBoard events too; None does if it is installed.
        sinks: More trackers for run.log.
        resume: "auto" goes on from the newest good checkpoint of the run directory, if there is one; a path takes that one where the run
            directory has none; "never" begins anew.

    Raises:
        StartError: AR001 to AR006, see core/place.py and comm/devices.py; AR007 another run is open; AR008 to AR012, see
            comm/joining.py.
        CommError: On the way out: AR020 another rank failed first, AR022 another rank left while this one needed it.
        UsageError: AR104, AR130 wrong settings; AR162 a sink is none.
    """
    if _open_runs:
        raise StartError(
            "AR007",
            "start() inside another run of this process",
            fix="one `with allranks.start(...)` around the whole training",
        )
    precision = overridden("precision", precision)
    threads = overridden("threads", threads)
    if is_overridden("micro_batch_size") or is_overridden("accumulation_steps"):
        micro_batch_size, accumulation_steps = None, 1  # the script's own choice of either gives way
    micro_batch_size = overridden("micro_batch_size", micro_batch_size)
    accumulation_steps = overridden("accumulation_steps", accumulation_steps)
    place = find_place(os.environ)
    chosen = pick_device(place, device)
    if place.world_size > 1:
        record.install()  # under torchrun or srun; under allranks run every process has its record already
    made_precision = Precision(precision, chosen)
    _check_sizes(global_batch_size, accumulation_steps, micro_batch_size)
    _check_numbers(seed=seed, start_timeout_s=start_timeout_s, timeout_s=timeout_s, threads=threads)
    check_sinks(sinks)
    if tf32 is not None:
        use_tf32(tf32)
    if deterministic is not None:
        use_deterministic(deterministic)
    with _logging(place):
        membership = join(
            place, chosen, start_timeout_s=start_timeout_s, timeout_s=timeout_s, backend=backend
        )
        error: BaseException | None = None
        run: Run | None = None
        try:
            folder = _agree_on_folder(run_dir)
            on_this_host = _local_affinities(place)
            thread_note = share_threads(place, threads, on_this_host) if chosen.type == "cpu" else ""
            if chosen.type == "cpu":
                keep_freed_memory(place.local_world_size)
            seed_generators(seed)
            run = Run(
                place=place,
                device=chosen,
                membership=membership,
                run_dir=folder,
                seed=seed,
                precision=made_precision,
                global_batch_size=global_batch_size,
                accumulation_steps=accumulation_steps,
                micro_batch_size=micro_batch_size,
                make_sinks=lambda resumed_at: [*default_sinks(folder, tensorboard, resumed_at), *sinks],
                sinks=tuple(sinks),
                num_cores=own_share(on_this_host),
            )
            run.resume_from = "never" if trial_folder() is not None else os.fspath(resume)
            _open_runs.append(run)
            _say(place, chosen, thread_note, folder)
            _tell_launcher(place, folder)
            yield run
        except BaseException as raised:
            error = raised
            told = None if _is_clean_exit(raised) else part(membership, raised)
            if told is not None:
                raise told from raised
            raise
        finally:
            is_failing = error is not None and not _is_clean_exit(error)
            with contextlib.nullcontext() if is_failing else _parting(membership):
                if run is not None:
                    _open_runs.remove(run)
                    run.close(failing=is_failing)


@contextlib.contextmanager
def _parting(membership: Membership) -> Iterator[None]:
    """Part in good order after the block, or with its error; another rank's failure is raised here, too."""
    try:
        yield
    except BaseException as error:
        told = part(membership, error)
        if told is not None:
            raise told from error
        raise
    told = part(membership, None)
    if told is not None:
        raise told


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _check_sizes(
    global_batch_size: int | None, accumulation_steps: int, micro_batch_size: int | None
) -> None:
    given = {
        "global_batch_size": global_batch_size,
        "accumulation_steps": accumulation_steps,
        "micro_batch_size": micro_batch_size,
    }
    for name, value in given.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError("AR130", f"{name}={value!r}", fix=f"{name} as a whole number, at least 1")
    if accumulation_steps > 1 and micro_batch_size is not None:
        raise UsageError(
            "AR130",
            f"accumulation_steps={accumulation_steps} and micro_batch_size={micro_batch_size}: each follows from the other",
            fix="give one of them",
        )


def _check_numbers(seed: int, start_timeout_s: float, timeout_s: float, threads: int | None) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise UsageError("AR104", f"seed={seed!r}", fix="seed as a whole number, the same on all ranks")
    for name, value in {"start_timeout_s": start_timeout_s, "timeout_s": timeout_s}.items():
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise UsageError("AR104", f"{name}={value!r}", fix=f"{name} in seconds, above 0")
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise UsageError(
            "AR104", f"threads={threads!r}", fix="threads as a whole number, at least 1, or None"
        )


def _local_affinities(place: Place) -> list[frozenset[int]]:
    """The cores of every rank on this host, the same for all or bound by the launcher to some of their own. Collective."""
    every = values.gather_objects((place.host, affinity()))
    return [cores for host, cores in every if host == place.host]


def _agree_on_folder(run_dir: str | os.PathLike[str] | None) -> Path:
    """The run directory, the same on all ranks even where their clocks differ. Nothing is created before it is written to. Collective."""
    trial = trial_folder()  # its files must not mix with those of the user's run
    named = trial / "run" if trial is not None else run_dir
    named = os.environ.get("ALLRANKS_RUN_DIR") if named is None else named
    if named is None:
        script = Path(sys.argv[0]).stem or "python"
        home = Path(os.environ.get("ALLRANKS_HOME", "runs"))
        named = home / f"{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    return Path(values.from_rank_zero(str(Path(named).absolute())))


def _tell_launcher(place: Place, folder: Path) -> None:
    """A script that names its own run directory has two: the launcher's gets a line of where the other is, for reports."""
    launched = os.environ.get("ALLRANKS_RUN_DIR")
    if not launched:
        note("run", path=str(folder))  # for `allranks watch RUN`
    if not place.is_rank_zero or not launched or Path(launched) == folder or not Path(launched).is_dir():
        return
    try:
        RunDir(Path(launched)).append_event("directory", path=str(folder))
    except OSError as error:
        logger.warning("%s: no line about %s was written: %s", launched, folder, error)


@contextlib.contextmanager
def _logging(place: Place) -> Iterator[None]:
    """Show our log lines on stderr for the run, where the user has not set up logging: all from rank 0, warnings from the others."""
    ours = logging.getLogger("allranks")
    if ours.handlers or logging.getLogger().handlers:
        yield
        return
    handler = logging.StreamHandler()
    where = f"rank {place.rank}/{place.world_size} {place.host}" if place.world_size > 1 else place.host
    handler.setFormatter(logging.Formatter(f"allranks [{where}] %(message)s"))
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO if place.is_rank_zero else logging.WARNING)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)


def _say(place: Place, device: torch.device, thread_note: str, folder: Path) -> None:
    logger.info("%s", place)
    logger.info("device %s%s; run directory %s", device, f", {thread_note}" if thread_note else "", folder)
