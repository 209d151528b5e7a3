"""AR734 unfrozen-later: parameters were frozen when DDP was built and are trained now: their gradients are never averaged."""

from __future__ import annotations

import re
from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.causes.drift import drift_of
from allranks.watch.evidence import Record
from allranks.watch.noted import say, who
from allranks.watch.reading import source_of, with_code
from allranks.watch.verdict import Place, Verdict

CODE, NAME = "AR734", "unfrozen-later"
_UNFREEZES = re.compile(r"requires_grad_\(\s*(True)?\s*\)|requires_grad\s*=\s*True")


def find(case: Case) -> Verdict | None:
    """Replicas differ in exactly such parameters as the model did not train when it was given to DDP."""
    drift = drift_of(case)
    if drift is None or not drift.names:
        return None
    record = next((r.record for r in drift.ranks.values() if r.record and r.record.model), None)
    if record is None or record.model is None:
        return None
    frozen = {line.split(" ")[0] for line in record.model.parameters if line.endswith(" frozen")}
    if not set(drift.names) <= frozen:
        return None
    ranks = sorted(drift.checks)
    names = ", ".join(drift.names[:4]) + (f" and {len(drift.names) - 4} more" if len(drift.names) > 4 else "")
    verdict = say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)}: {names} {'was' if len(drift.names) == 1 else 'were'} unfrozen after DDP was built: never averaged",
        ranks,
        where=[*_lines(_script_of(record)), *(f"parameter {n}" for n in drift.names[:5])],
        facts=[
            f"frozen when DDP was built, different between the ranks {drift.since()}",
            "DDP averages only parameters that required a gradient when it was built",
        ],
        fix="unfreeze before DistributedDataParallel(model), or build DDP anew after unfreezing, on all ranks",
    )
    return replace(verdict, step=drift.found.key[0])


def _script_of(record: Record) -> Place | None:
    """A line of the training script: of the phase, of its loop over the loader, of a collective."""
    known = [record.where, record.loader.where if record.loader else None, *(c.where for c in record.calls)]
    return next((p for p in known if p is not None), None)


def _lines(near: Place | None) -> list[Place]:
    """The lines of the training script that unfreeze something."""
    if near is None:
        return []
    lines = source_of(near.file).splitlines()
    return [with_code(Place(near.file, n)) for n, text in enumerate(lines, 1) if _UNFREEZES.search(text)][:2]
