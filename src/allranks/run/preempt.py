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

SQUEUE_S = 20.0


def ask_to_stop(node_dir: Path, why: str) -> None:
    """Make the stop file of this node."""
    path = node_dir / "stop"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_suffix(".making")
        making.write_text(json.dumps({"why": why, "unix_time": time.time()}))
        making.replace(path)  # whole, or not there


class ScheduledStop:
    """The moment of --stop-before. Slurm may have to be asked for the end of the job, and may take long: nothing waits for it.

    Without the option, or without a known end (which is said), it never comes.

    Args:
        options: As given.
        env: The environment of the agent.
        say: Prints a line for the user.
    """

    def __init__(self, options: Options, env: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.at: float | None = None
        """Unix time; None while it is not known."""
        self._before_s, self._say = options.stop_before_s, say
        self._asked: subprocess.Popen[str] | None = None
        if self._before_s is None:
            return
        end, job = env.get("SLURM_JOB_END_TIME", ""), env.get("SLURM_JOB_ID")
        if not end.isdigit() and job:  # before version 23.02 Slurm does not tell the job
            self._asked, self._give_up_at = _ask_for_end(job, env), time.monotonic() + SQUEUE_S
        if self._asked is None:
            self._set(float(end) if end.isdigit() else None)

    @property
    def is_asking(self) -> bool:
        """Whether Slurm's answer is still to come."""
        return self._asked is not None

    def strikes(self, unix_time: float) -> bool:
        """Whether the moment has come; once. To be called a few times a second."""
        if self._asked is not None and (
            self._asked.poll() is not None or time.monotonic() > self._give_up_at
        ):
            self._set(_end_of_answer(self.close()))
        if self.at is None or unix_time < self.at:
            return False
        self.at = self._before_s = None
        return True

    def close(self) -> str:
        """Leave no process behind; gives back what it has answered."""
        asked, self._asked = self._asked, None
        if asked is None:
            return ""
        if asked.poll() is not None:
            return asked.communicate()[0]
        asked.kill()
        asked.wait()
        if asked.stdout is not None:
            asked.stdout.close()
        return ""

    def _set(self, end: float | None) -> None:
        if end is None:
            self._say(
                "allranks: --stop-before has no effect: the end of this job is not known (no Slurm, or no time limit)"
            )
        elif self._before_s is not None:
            self.at = end - self._before_s


def _ask_for_end(job: str, env: Mapping[str, str]) -> subprocess.Popen[str] | None:
    try:
        return subprocess.Popen(
            ["squeue", "--noheader", "--jobs", job, "--format", "%e"],
            env={**env, "SLURM_TIME_FORMAT": "standard"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:  # no squeue
        return None


def _end_of_answer(said: str) -> float | None:
    try:
        return datetime.fromisoformat(said.strip()).timestamp()
    except ValueError:  # "NONE" where there is no limit, or nothing
        return None
