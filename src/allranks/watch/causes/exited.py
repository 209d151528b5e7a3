"""AR205 rank-exited: a rank left by sys.exit or os._exit in the middle of the job."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.evidence import Rank
from allranks.watch.related import UNKNOWN_RANK
from allranks.watch.verdict import Verdict

CODE, NAME = "AR205", "rank-exited"


def find(case: Case) -> Verdict | None:
    left = [r for r in (*case.roots, *case.finished) if left_by_call(r)]
    quiet = [r for r in case.roots if r.exit and r.exit.signal is None and r.failure is None and not _said(r)]
    found = left or quiet
    if (
        not found
        or (case.roots and case.roots[0] not in found)
        or not (case.roots or case.waiting_for(found) or case.victims)
    ):
        return None
    first = found[0]
    call, code = "exit", first.exit.code if first.exit else first.record.exit_code if first.record else 0
    where: tuple[str, ...] | None = None
    if first.record is not None:
        call = {"hard_exit": "os._exit", "system_exit": "sys.exit"}.get(first.record.exit_kind, "exit")
        where = case.frames([first.record.exit_where]) if first.record.exit_where else None
    said, fix = (
        [],
        "let all ranks leave together: agree on it with an all_reduce of the decision before leaving",
    )
    after = case.waits_for([first])
    if unknown := next((x for x in reversed(first.output) if UNKNOWN_RANK.search(x)), ""):
        after = f": {unknown.strip()[-80:]}"
        said, where = [unknown.strip()[:160]], (*map(case.at, first.related), *(where or ()))
        fix = (
            "read LOCAL_RANK from the environment: int(os.environ['LOCAL_RANK']); "
            "add_argument('--local-rank', '--local_rank') accepts both spellings"
        )
    elif code and (last := next((x.strip() for x in reversed(first.output) if x.strip()), "")):
        said = [f"the last that it printed: {last[:160]}"]
    return case.verdict(
        CODE,
        NAME,
        f"{case.who([first])} exited with code {code} ({call}) in the middle of the job{after}",
        [first],
        where=where,
        facts=[f"the process ended itself with code {code}; no exception, no signal", *said],
        fix=fix,
        can_go_on=False,
    )


def left_by_call(rank: Rank) -> bool:
    """Whether the rank called sys.exit or os._exit."""
    return rank.record is not None and rank.record.exit_kind in ("system_exit", "hard_exit")


def _said(rank: Rank) -> bool:
    return (
        rank.record is not None
        and rank.record.exception is not None
        and rank.record.exception.kind != "SystemExit"
    )
