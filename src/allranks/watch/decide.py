"""What does the evidence say? A pure function from evidence to a verdict."""

from __future__ import annotations

from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.causes import (
    CAUSES,
    SILENT,
    drift,
    gradient_not_finite,
    not_finite,
    rates_differ,
    straggler,
    unfrozen,
)
from allranks.watch.evidence import Evidence
from allranks.watch.explained import explained
from allranks.watch.verdict import Alternative, Verdict


def decide(evidence: Evidence) -> Verdict | None:
    """The most probable verdict, with the next one as an alternative where it is not certain; None if nothing is shown."""
    case = Case(evidence)
    return explained(case, _decide(case))


def _decide(case: Case) -> Verdict | None:
    evidence = case.evidence
    if evidence.trigger == "slow":
        return straggler.find(case)
    if evidence.trigger == "numbers":
        by_numbers = (gradient_not_finite, not_finite, rates_differ, unfrozen, drift)
        return next((v for cause in by_numbers if (v := cause.find(case)) is not None), None)
    if evidence.trigger == "notes":
        return next(iter(decide_all(evidence)), None)
    first: Verdict | None = None
    for cause in CAUSES:
        verdict = cause.find(case)
        if verdict is None:
            continue
        if first is None:
            first = verdict
            if first.confidence == "certain":
                return first
        elif verdict.code != first.code:
            other = Alternative(verdict.code, verdict.what, "the stacks in diagnosis/ decide")
            return first if first.alternatives else replace(first, alternatives=(other,))
    return first


def decide_all(evidence: Evidence) -> tuple[Verdict, ...]:
    """Everything that is wrong in silence: several things may be at once, and the job goes on."""
    case = Case(evidence)
    return tuple(v for cause in SILENT if (v := explained(case, cause.find(case))) is not None)
