"""AR269 failed-call-caught: the communication of a call failed, the script caught that, and trains on or ends as if all were well."""

from __future__ import annotations

import re

from allranks.record import thrown
from allranks.watch.case import LOST_PEERS, Case
from allranks.watch.evidence import Rank, Record
from allranks.watch.noted import say, who
from allranks.watch.observed import Caught
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR269", "failed-call-caught"
_SOURCE = re.compile(r"^\[[^\]]*\]\s*")
NO_DATA = ("barrier", "monitored_barrier", "init_process_group", thrown.BATCH)
"""What brings nothing from other ranks that one could miss."""


def find(case: Case) -> Verdict | None:
    """Of the first rank to go on, with the others that met with the same."""
    found: dict[int, Caught] = {}
    for rank in case.evidence.ranks:
        if (first := _first(rank)) is not None:
            found[rank.rank] = first
    if not found:
        return None
    ranks, one = sorted(found), found[min(found, key=lambda n: (found[n].step, n))]
    records = [r.record for r in case.evidence.ranks if r.rank in found and r.record is not None]
    ended = [r for r in records if _has_ended(r)]
    facts = [
        f"{one.kinds[0]}: {_short(one.message)}",
        f"{many(ranks, 'it has', 'they have')} come to the end of the script with code 0"
        if len(ended) == len(records)
        else f"steps done since: {max(r.step for r in records) - one.step}",
        "what the call was to bring from the other ranks never came: the ranks need not be the same any more",
    ]
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)} went on after {_what(one.what)} had failed for want of the other ranks",
        ranks,
        where=[one.handler, one.where],
        facts=facts,
        fix="let the error end the job: catch what may be skipped (a broken sample) around that line only, never around a collective",
        step=one.step + 1,
    )


def _first(rank: Rank) -> Caught | None:
    record = rank.record
    return next((e for e in rank.caught if _is_lost(e) and record is not None and _went_on(record, e)), None)


def _is_lost(error: Caught) -> bool:
    is_ours = error.what not in NO_DATA and not error.has_met_again
    return is_ours and bool(LOST_PEERS.search(error.message))


def _went_on(record: Record, error: Caught) -> bool:
    return record.exception is None and (_has_ended(record) or record.step > error.step)


def _has_ended(record: Record) -> bool:
    return record.exit_kind == "ended" and record.exit_code == 0


def _short(message: str) -> str:
    """Without the place in torch's own source, and the advice that follows."""
    return _SOURCE.sub("", message).partition(". ")[0]


def _what(what: str) -> str:
    return f"a {what}" if what in ("forward", "backward") else what
