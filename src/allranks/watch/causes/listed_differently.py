"""AR748 listed-differently: ranks have the same files in another order, so dividing by index gives some twice and some to nobody."""

from __future__ import annotations

import re
from itertools import combinations

from allranks.watch.case import Case
from allranks.watch.noted import Note, on_all, place, say, who
from allranks.watch.reading import source_of, with_code
from allranks.watch.verdict import Place, Verdict

CODE, NAME = "AR748", "listed-differently"
_LISTS = re.compile(r"\b(listdir|iterdir|glob|rglob|iglob|scandir|walk)\(")


def find(case: Case) -> Verdict | None:
    """A list of texts that two ranks hold in another order, or of which they share a part."""
    for _, found in on_all(case, "pass", "loader", "number", "line"):
        lists = {rank: _lists(n) for rank, n in found.items()}
        for a, b in combinations(lists, 2):
            for path in sorted(set(lists[a]) & set(lists[b])):
                if what := _difference(lists[a][path], lists[b][path]):
                    return _verdict(case, found, [a, b], path, lists, what)
    return None


def _lists(note: Note) -> dict[str, list]:
    parts = (note.get("dataset") or {}).get("parts", ())
    return {p[0]: p for p in parts if len(p) > 5 and p[1] >= 2 and p[5]}


def _difference(one: list, other: list) -> str:
    if one[3] == other[3]:
        return "in another order" if one[2] != other[2] else ""
    both = set(one[5]) & set(other[5])
    is_part = 2 <= len(both) < min(len(set(one[5])), len(set(other[5])))
    return "some on both, so others on neither" if is_part else ""


def _verdict(
    case: Case,
    found: dict[int, Note],
    ranks: list[int],
    path: str,
    lists: dict[int, dict[str, list]],
    what: str,
) -> Verdict:
    one, other = (lists[r][path] for r in ranks)
    first = next((i for i, (x, y) in enumerate(zip(one[4], other[4], strict=False)) if x != y), 0)
    where, code = place(found[ranks[0]]), place(found[ranks[0]]["dataset"], "code")
    unsorted = _unsorted_listing(code or where)
    return say(
        case,
        CODE,
        NAME,
        f"{who(case, ranks)} have the files of {found[ranks[0]]['dataset']['class']}.{path} {what}",
        ranks,
        where=[*unsorted, code, where],
        facts=[
            f"first difference at {first}: {one[4][first]} on rank {ranks[0]}, {other[4][first]} on rank {ranks[1]}"
            if first < min(len(one[4]), len(other[4]))
            else "",
            "a directory is listed in an order of its own on each host",
        ],
        fix="sort what is listed: files = sorted(os.listdir(folder))",
    )


def _unsorted_listing(near: Place | None) -> list[Place]:
    """Lines of the same file that list a directory without sorting it."""
    if near is None:
        return []
    lines = source_of(near.file).splitlines()
    hits = [
        n
        for n, text in enumerate(lines, 1)
        if _LISTS.search(text) and "sorted(" not in text and ".sort(" not in text
    ]
    return [with_code(Place(near.file, n)) for n in hits[:2]]
