"""How are ranks asked to save and leave before somebody takes the machine away?

By a file, `ALLRANKS_STOP_FILE`, that appears on every node; a rank looks for it at each update (one stat, about 1 us), so nothing is
communicated until it is there. Its content is {"why": "SIGTERM", "unix_time": ...}.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from allranks.run.options import Options


def ask_to_stop(node_dir: Path, why: str) -> None:
    """Make the stop file of this node."""
    path = node_dir / "stop"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_suffix(".making")
        making.write_text(json.dumps({"why": why, "unix_time": time.time()}))
        making.replace(path)  # whole, or not there


def scheduled_stop(options: Options, env: Mapping[str, str], say: Callable[[str], None]) -> float | None:
    """Unix time at which --stop-before strikes; None without it or without a known end, which is said."""
    if options.stop_before_s is None:
        return None
    end = env.get("SLURM_JOB_END_TIME", "")
    ends_at = float(end) if end.isdigit() else _end_by_squeue(env)
    if ends_at is None:
        say(
            "allranks: --stop-before has no effect: the end of this job is not known (no Slurm, or no time limit)"
        )
        return None
    return ends_at - options.stop_before_s


def _end_by_squeue(env: Mapping[str, str]) -> float | None:
    """The end that Slurm has for this job: before version 23.02 it does not tell the job."""
    if not (job := env.get("SLURM_JOB_ID")):
        return None
    try:
        said = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format", "%e"],
            env={**env, "SLURM_TIME_FORMAT": "standard"},
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return datetime.fromisoformat(said.stdout.strip()).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError):  # no squeue, or "NONE" where there is no limit
        return None
