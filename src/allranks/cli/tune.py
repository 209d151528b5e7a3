"""`allranks tune`: which settings make this script quickest on this machine?"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from allranks.tune.knobs import Machine

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""What stands behind the script is the script's."""


def command(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script; its own arguments follow.")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks of this machine.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for the whole search.")] = 5.0,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Time to look at one trial, after its start.")
    ] = 4.0,
    only: Annotated[str, typer.Option(help="Settings to turn, with commas; all if not given.")] = "",
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            help="The values to try of a setting, such as num_workers=1,4,16; may be given several times.",
        ),
    ] = None,
    without: Annotated[str, typer.Option(help="Settings to leave alone, with commas.")] = "",
    allow_changes: Annotated[
        bool,
        typer.Option(
            "--allow-changes",
            "--allow-rounding",
            help="Also try what changes the training: precision, compress, micro-batches of a model with batch norm.",
        ),
    ] = False,
    launch: Annotated[str, typer.Option(help="More flags for allranks run, such as '-m'.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (allranks-tune/1).")] = False,
    out: Annotated[Path | None, typer.Option(help="Write that JSON to this file, too.")] = None,
) -> None:
    """Try settings, each in a job of its own that is stopped after some seconds, and say which are worth it.

    Settings of the library (loader workers, micro-batches, buckets, ...) are tried where the script uses allranks; threads and cores with
    any script. The script runs as it is: what it writes, it writes; only the run directory of allranks is another one.

    Example: allranks tune --nproc 2 --minutes 5 train.py --lr 0.1
    """
    from allranks.run.trial import other_work
    from allranks.tune import words
    from allranks.tune.knobs import knobs_for
    from allranks.tune.search import Search
    from allranks.tune.trial import Script, Trials

    names = _names(only, "--only"), _names(without, "--without")
    wanted = _values(values or [])
    options = tuple(shlex.split(launch))
    if not Path(script).is_file() and "-m" not in options and "--module" not in options:
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    tried = Script(script, tuple(args or ()), nproc, options)
    began = time.monotonic()
    trials = Trials(tried, measure_s=seconds, ends_at=began + 60 * minutes)

    def say(text: str) -> None:
        print(f"[allranks {time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    if busy := other_work():
        say(busy)
    start = trials({}, 0.0)
    say(words.trial_line(start, None))
    knobs = knobs_for(
        _machine(nproc),
        trials.in_effect,
        only=names[0],
        without=names[1],
        may_change_results=allow_changes,
        values=wanted,
    )
    say(f"turning {', '.join(k.name for k in knobs.turned) or 'nothing: there is nothing to turn here'}")
    search = Search(
        knobs.turned,
        trials,
        budget_s=60 * minutes - (time.monotonic() - began),
        clock=time.monotonic,
        on_trial=lambda measured, best: say(words.trial_line(measured, best)),
    )
    found = search.run(start)
    took = time.monotonic() - began
    data = words.as_json(tried, found, took, knobs.left)
    if out is not None:
        out.write_text(json.dumps(data, indent=2) + "\n")
    print(json.dumps(data, indent=2) if as_json else words.report(tried, found, took, knobs.left))
    raise typer.Exit(3 if found.best.failure else 0)


def _machine(nproc: int) -> Machine:
    """This one."""
    from allranks.core.cores import usable_cores
    from allranks.run import devices
    from allranks.tune.knobs import Machine

    num_gpus = devices.find({}).num_gpus
    has_compiler = num_gpus > 0 or bool(shutil.which("g++") or shutil.which("clang++"))
    free_mb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    with suppress(OSError, StopIteration):  # what the kernel would give up for it counts, too
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_mb = next(int(line.split()[1]) >> 10 for line in lines if line.startswith("MemAvailable:"))
    return Machine(usable_cores(), nproc, num_gpus, has_compiler, free_mb)


def _names(text: str, option: str) -> tuple[str, ...]:
    """Known settings in a list with commas."""
    from allranks.core.overrides import SETTINGS

    names = tuple(part.strip().replace("-", "_") for part in text.split(",") if part.strip())
    for name in names:
        if name not in SETTINGS:
            raise typer.BadParameter(f"no setting {name}; there are {', '.join(SETTINGS)}", param_hint=option)
    return names


def _values(given: list[str]) -> dict[str, tuple[Any, ...]]:
    """By setting, the values to try."""
    from allranks.core.errors import StartError
    from allranks.core.overrides import parse_setting

    found: dict[str, tuple[Any, ...]] = {}
    for each in given:
        name, _, texts = each.partition("=")
        (name,) = _names(name, "--try") or ("",)
        try:
            found[name] = tuple(parse_setting(name, text.strip()) for text in texts.split(","))
        except StartError as error:
            raise typer.BadParameter(error.what.replace("--set ", ""), param_hint="--try") from None
    return found
