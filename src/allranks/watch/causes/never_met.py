"""AR300 rank-missing: ranks wait in init_process_group for ranks that have not come."""

from __future__ import annotations

from allranks.watch.case import Case, stuck_at
from allranks.watch.store import meeting_point
from allranks.watch.verdict import Verdict, many, ranks_text, seconds

CODE, NAME = "AR300", "rank-missing"


def find(case: Case) -> Verdict | None:
    here = [n for n, w in case.waits.items() if w.kind == "init"]
    known = {r.rank for r in case.evidence.ranks}
    promised = max(
        [case.evidence.world_size, *(r.record.said_world_size for r in case.evidence.ranks if r.record)]
    )
    missing = [n for n in range(promised) if n not in known]
    if not here or case.roots:
        return None
    late = [r for r in case.stuck if r.record is None or r.record.phase in ("start", "import", "python")]
    if missing:
        return _absent(case, here, missing, promised)
    late_now = [(r, a) for r in late if not case.is_early(r, (a := case.activity(r)))]
    if not late_now:
        return None
    doing = late_now[0][1]
    return stuck_at(
        case,
        CODE,
        NAME,
        late_now,
        f"has not come to init_process_group ({doing.words}): waiting for it, {len(here)} of {case.evidence.world_size} ranks are there",
        facts=[f"present: {ranks_text(here)}"],
        fix="see the line it stands at; work that only one rank does belongs after init_process_group, with a barrier",
    )


def _absent(case: Case, here: list[int], missing: list[int], promised: int) -> Verdict:
    waited = case.waited_s()
    return Verdict(
        code=CODE,
        name=NAME,
        what=(
            f"{ranks_text(missing)} {many(missing, 'is', 'are')} missing: only {len(here)} "
            f"of {promised} ranks have come to init_process_group"
        ),
        ranks=tuple(missing),
        where=tuple(line for n in here[:1] if (r := case.evidence.rank(n)) for line in case.stands_at(r)[:1]),
        since_s=waited,
        others=case.others(),
        facts=(
            f"present: {ranks_text(here)}; missing: {ranks_text(missing)}",
            f"they have waited {seconds(waited or 0.0)}",
            *(
                f"they meet at {meeting_point(r)}"
                for n in here[:1]
                if (r := case.evidence.rank(n)) and meeting_point(r)
            ),
        ),
        fix=(
            "start the missing ranks (on the node that should run them: `allranks run --nnodes ...`), or let the script take "
            "the number of ranks from the launcher: init_process_group() without rank= and world_size="
        ),
    )
