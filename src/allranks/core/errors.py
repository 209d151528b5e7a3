"""How does allranks say that something is wrong?

    AllranksError                      every error of ours: a code, what, where, why, fix
    |-- StartError                     AR0xx  the job cannot start: environment, launch, rendezvous
    |-- UsageError (ValueError)        AR1xx  the library is used wrongly: data, model, step
    |-- RanksDisagree                  AR2xx  the ranks do not agree where they must (models, loaders, values)
    |-- CommError                      AR3xx  communication failed
    |-- CheckpointError                AR6xx  saving, loading, resuming
    `-- ResultError                    AR7xx  the numbers are wrong: NaN, drift

A code is one cause with one page, docs/causes/ARnnn.md, and is never used again for another.
"""

from __future__ import annotations

import os
import socket
import warnings

_RANK_AND_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # the latter only inside a step of srun
)


def where_am_i() -> str:
    """This process as an error names it: 'rank 1 of 4 on host gpu-a', or only the host outside a job."""
    host = socket.gethostname()
    for rank, world_size in _RANK_AND_SIZE:
        if rank in os.environ and world_size in os.environ:
            return f"rank {os.environ[rank]} of {os.environ[world_size]} on host {host}"
    return f"host {host}"


class AllranksError(RuntimeError):
    """An error with the code of its cause, and what to do about it.

    Args:
        code: The cause, "ARnnn"; docs/causes has its page.
        what: One sentence of fact, with the values and the user's names.
        why: The evidence; begins with "likely" where it is a guess.
        fix: Something the user can paste or do.
        where: Rank and host; this process if not given.
    """

    def __init__(self, code: str, what: str, *, why: str = "", fix: str = "", where: str = "") -> None:
        self.code, self.what, self.why, self.fix = code, what, why, fix
        self.where = where or where_am_i()
        super().__init__(self.text())

    def text(self) -> str:
        """The message as people read it, several lines, the cause first."""
        lines = [f"{self.code} {self.what}", f"  where: {self.where}"]
        if self.why:
            lines.append(f"  why:   {self.why}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        lines.append(f"  more:  allranks explain {self.code}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between processes; the default would call __init__ with the finished text as the code.
        return _rebuild, (type(self), self.code, self.what, self.why, self.fix, self.where)


def _rebuild(
    kind: type[AllranksError], code: str, what: str, why: str, fix: str, where: str
) -> AllranksError:
    return kind(code, what, why=why, fix=fix, where=where)


class StartError(AllranksError):
    """The job cannot start as it was asked to."""


class UsageError(AllranksError, ValueError):
    """A part of allranks was called in a way that cannot be right."""


class RanksDisagree(AllranksError):
    """Ranks hold different things where they must hold the same."""


class CommError(AllranksError):
    """A collective or a process group failed."""


class CheckpointError(AllranksError):
    """A checkpoint cannot be written, verified or loaded."""


class ResultError(AllranksError):
    """The numbers of the training are wrong."""


class AllranksWarning(UserWarning):
    """Something works, but not as the user may think."""


def warn_once(code: str, text: str) -> None:
    """Warn once per process and text; says how to make it go away in the text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"{code} {text}", AllranksWarning, stacklevel=3)


_warned: set[str] = set()
