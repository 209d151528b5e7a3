"""AR211 file-written-by-several-ranks: ranks wrote one and the same file, and it cannot be read."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.causes.raised import failure_of
from allranks.watch.evidence import Rank
from allranks.watch.noted import notes, place
from allranks.watch.verdict import Verdict, many, ranks_text

CODE, NAME = "AR211", "file-written-by-several-ranks"

_DAMAGED = re.compile(
    r"^EOFError: ?$|PytorchStreamReader|UnpicklingError|invalid load key|unexpected EOF|Ran out of input|zip archive"
    r"|unexpected pos|record size .* does not match|not find file|corrupted"
    r"|file in archive|enforce fail at inline_container|pickle data was truncated"
)

_LOCAL = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")
"""Of each host its own: a path below them is not one file on two hosts."""


def find(case: Case) -> Verdict | None:
    said = [r for r in case.roots if (f := failure_of(r)) and _DAMAGED.search(f"{f.kind}: {f.message}")]
    if not said or case.roots[0] not in said:
        return None
    used = {str(n.get("path")) for kind in _kinds(said[0]) for n in notes(said[0], kind)}
    near = [r for r in case.evidence.ranks if r.host == said[0].host]
    writers = {
        path: [r for r in (near if path.startswith(_LOCAL) else case.evidence.ranks) if _wrote(r, path)]
        for path in used
    }
    path = max(writers, key=lambda p: len(writers[p]), default="")
    if not path or len(writers[path]) < 2:
        return None
    ranks = writers[path]
    numbers = [r.rank for r in ranks]
    failure = failure_of(said[0])
    assert failure is not None
    lines = [case.at(place(n)) for r in ranks[:1] for n in notes(r, "saved") if n.get("path") == path]
    return case.verdict(
        CODE,
        NAME,
        f"{case.who(ranks)} write one file, {path}, and {ranks_text([r.rank for r in said])} "
        f"{many([r.rank for r in said], 'cannot', 'cannot')} read it",
        ranks,
        where=tuple(dict.fromkeys([*filter(None, lines), *case.frames(failure.frames)])),
        facts=[
            f"{ranks_text(numbers)} called torch.save with this path",
            f"{failure.kind}: {failure.message.splitlines()[0][:160] if failure.message else ''}",
        ],
        fix="let rank 0 alone write it, to another name, then os.replace(); or put the rank into the name; a barrier before reading",
        can_go_on=False,
    )


def _kinds(rank: Rank) -> tuple[str, ...]:
    """Notes of the files among which the damaged one is: of torch.load, torch.save, or none if another function read it."""
    frames = rank.failure.frames if rank.failure else ()
    if not frames:
        return "loaded", "saved"
    functions = [f.function for f in frames if f.file.endswith("torch/serialization.py")]
    return tuple(kind for name, kind in (("load", "loaded"), ("save", "saved")) if name in functions)


def _wrote(rank: Rank, path: str) -> bool:
    return any(n.get("path") == path for n in notes(rank, "saved"))
