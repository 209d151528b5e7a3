"""Which numbers of a run are to be doubted? Said at its end and in its report, never while it runs."""

from __future__ import annotations

from allranks.perf import mean_of_means, own_values
from allranks.perf.values import History
from allranks.perf.view import Cause


def find_remarks(history: History) -> list[Cause]:
    """What one rank logs as the job's, and targets that count unequally."""
    return [*own_values.find_remarks(history), *mean_of_means.find_remarks(history)]
