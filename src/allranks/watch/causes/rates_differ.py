"""AR735 rates-differ: the learning rate is not the same on all ranks, so the parameters drift apart."""

from __future__ import annotations

import struct
from dataclasses import replace

from allranks.record.fingerprints import RATE
from allranks.watch.case import Case
from allranks.watch.causes.drift import drift_of
from allranks.watch.noted import by_rank, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR735", "rates-differ"


def find(case: Case) -> Verdict | None:
    """Replicas were compared, and what differs first is the learning rate."""
    drift = drift_of(case)
    if drift is None or RATE not in drift.names:
        return None
    rates = {n: _rate(drift.value(n, RATE)) for n in sorted(drift.checks)}
    said = ", ".join(f"{rate:g} on rank {n}" for n, rate in rates.items())
    plateaus = {n: own for n, own in by_rank(case, "plateau").items() if n in rates}
    first = next(iter(plateaus.values()), [None])[0]
    values = ", ".join(f"{own[-1]['value']:.4g} on rank {n}" for n, own in plateaus.items())
    verdict = say(
        case,
        CODE,
        NAME,
        f"{who(case, list(rates))}: the learning rates differ: {said}, {drift.since()}",
        list(rates),
        where=[place(first) if first else None],
        facts=[
            f"{first['name']}.step was given {values}: each rank's own value" if first else "",
            "each rank makes steps of another size with the same gradient"
            if len(drift.names) == 1
            else "the parameters differ, too",
        ],
        fix="give the scheduler the same value on all ranks: dist.all_reduce(loss, op=dist.ReduceOp.AVG) before scheduler.step(loss)",
    )
    return replace(verdict, step=drift.found.key[0])


def _rate(bits: int) -> float:
    return struct.unpack("d", struct.pack("q", bits))[0]
