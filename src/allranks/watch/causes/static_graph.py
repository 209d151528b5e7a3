"""AR284 static-graph-violated: the graph changed although static_graph=True was promised."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR284", "static-graph-violated"

_TORCH_SAYS = re.compile(r"static.graph|training graph has changed|Your training graph")
_PARAMETER = re.compile(r"Parameter at index \d+(?: with name ([\w.]+))?")


def find(case: Case) -> Verdict | None:
    said = [r for r in case.roots if r.failure and _TORCH_SAYS.search(r.failure.message)]
    if not said or case.roots[0] not in said or said[0].failure is None:
        return None
    failure = said[0].failure
    names = sorted({n for n in _PARAMETER.findall(failure.message) if n})
    named = f" ({', '.join(names)})" if names else ""
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(said)}: static_graph=True was promised, but the used parameters changed between steps{named}",
        said,
        where=case.frames(failure.frames),
        facts=[
            failure.message.split("\n")[0][:200],
            f"{case.who(said)} {many([r.rank for r in said], 'says', 'say')} so",
        ],
        fix="leave static_graph out, or use the same parameters in every step; an output that is not in the loss changes the graph, too",
        can_go_on=False,
    )
