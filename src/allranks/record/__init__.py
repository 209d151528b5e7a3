"""What is each process of the job doing? The mapped record, the probe, and the run directory.

recorder()   the writer of this process's record, for the library's own marks
install()    marks torch's calls where no `allranks run` has done so
"""

from __future__ import annotations

TYPE_CHECKING = (
    False  # this file runs at the start of every process of a job: nothing is imported before it is used
)
if TYPE_CHECKING:
    from allranks.record.writer import Writer

__all__ = ["install", "recorder"]


def recorder() -> Writer:
    """The writer of this process's record; in memory only, if no launcher and no `install` gave it a page.

    `set_step(step, micro_step, epoch)`, `phase(Phase.EVALUATE)` / `leave()`, `collective("name")`: all are cheap enough
    for every step and never raise. What torch does underneath is marked by the probe.
    """
    from allranks.record.process import WRITER

    return WRITER


def install() -> None:
    """Give this process a record, if `allranks run` has not. Not collective; never raises; a second time does nothing."""
    from allranks.record import inprocess

    inprocess.install()
