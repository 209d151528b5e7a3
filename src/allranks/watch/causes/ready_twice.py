"""AR283 marked-ready-twice: a parameter's gradient came twice in one backward."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR283", "marked-ready-twice"

_TORCH_SAYS = re.compile(r"mark a variable ready only once|marked as ready twice")
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
        f"{case.who(said)}: a parameter got its gradient twice in one backward of DDP{named}",
        said,
        where=tuple(dict.fromkeys([*case.frames(failure.frames), *map(case.at, said[0].related)])),
        facts=[
            failure.message.split("\n")[0][:200],
            f"{case.who(said)} {many([r.rank for r in said], 'says', 'say')} so",
        ],
        fix=(
            "use each parameter in one forward per backward: no reentrant checkpoint "
            "(use_reentrant=False), and no find_unused_parameters with two forwards; or static_graph=True"
        ),
        can_go_on=False,
    )
