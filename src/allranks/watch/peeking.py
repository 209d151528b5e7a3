"""Which values did a line of the user's depend on, on each rank? Read from outside, and only for the names in that one line.

py-spy reads local variables of a process without stopping it: numbers, texts and short lists of them; of objects and tensors it knows no
more than the type, which is not told. What sounds or looks like a secret is never read out.
"""

from __future__ import annotations

import builtins
import io
import json
import keyword
import re
import tokenize
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

from allranks.watch.asking import py_spy
from allranks.watch.decide import decide
from allranks.watch.evidence import Evidence, Rank
from allranks.watch.observed import Value
from allranks.watch.reading import ways_out
from allranks.watch.stacks import main_stack
from allranks.watch.verdict import Place, Verdict

ENTERED, LEFT = "AR250", "AR265"
"""A call that only some ranks came to; a loop that only some ranks left."""
WITHIN_S = 0.4
MOST_RANKS, MOST_NAMES, MOST_CHARACTERS = 8, 6, 80
_SECRET = re.compile(r"token|key|passw|pwd|secret|credential|auth|cookie|dsn|(^|_)pw($|_|\d)", re.I)
_LOOKS_SECRET = re.compile(r"://[^/\s]*@|(?=[A-Za-z]*\d)[A-Za-z0-9]{20,}")
"""An address with a password, or many letters with a digit in one word."""
_PLAIN = re.compile(r"""[-+\w\s.,()\[\]]+|"[^"]*"|'[^']*'""")
_WORDS = ("True", "False", "None", "nan", "inf")


def with_values(evidence: Evidence, verdict: Verdict, node_rank: int) -> tuple[Evidence, Verdict]:
    """Both, with the values that the guilty line's condition has on the ranks of this node; as they were where there are none."""
    places = conditions(evidence, verdict)
    wanted = [(place, names) for place in places[:2] if (names := names_in(place.code))]
    here = [r for r in evidence.ranks if r.node_rank == node_rank and r.is_alive]
    asked = [r for r in here if any(_is_in(r, place) for place, _ in wanted)][:MOST_RANKS]
    if not asked:
        return evidence, verdict
    with ThreadPoolExecutor(max_workers=MOST_RANKS) as pool:
        texts = list(pool.map(lambda r: py_spy(r.pid, WITHIN_S, "--locals"), asked))
    found = {
        r.rank: tuple(v for place, names in wanted for v in values_of(text, place, names))
        for r, text in zip(asked, texts, strict=True)
    }
    if not any(found.values()):
        return evidence, verdict
    ranks = tuple(replace(r, values=found.get(r.rank, ())) for r in evidence.ranks)
    more = replace(evidence, ranks=ranks)
    again = decide(more)
    return (more, again) if again is not None and again.same_as(verdict) else (evidence, verdict)


def conditions(evidence: Evidence, verdict: Verdict) -> tuple[Place, ...]:
    """The lines that decide whether a rank comes where the guilty ones are; none where that is their number."""
    found: list[Place] = []
    for rank in evidence.ranks:
        is_guilty = rank.rank in verdict.ranks
        if verdict.code == ENTERED and is_guilty and rank.guard is None:
            found += [loop.condition or loop.at for loop in rank.loops[:1]]
            found += [rank.condition] if rank.condition is not None else []
        elif verdict.code == LEFT and not is_guilty:
            found += [place for loop in rank.loops for place in ways_out(loop)]
    return tuple(dict.fromkeys(found))


def names_in(code: str) -> tuple[str, ...]:
    """The variables in a line of code: no attributes, no functions that are called, nothing of Python's own, no secrets."""
    found: dict[str, None] = {}
    before = ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(code).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return ()
    for token, after in pairwise(tokens):
        is_name = token.type == tokenize.NAME and before != "." and after.string != "("
        name = token.string
        if (
            is_name
            and not keyword.iskeyword(name)
            and not hasattr(builtins, name)
            and not _SECRET.search(name)
        ):
            found[name] = None
        before = token.string
    return tuple(found)[:MOST_NAMES]


def values_of(text: str, place: Place, names: tuple[str, ...]) -> list[Value]:
    """The values of these names in the innermost frame of the place's function on the main thread, of what py-spy printed."""
    try:
        threads = json.loads(text)
    except ValueError:
        return []
    main = [t for t in threads if t.get("os_thread_id") == t.get("pid")] or threads[:1]
    frames = [
        f
        for t in main
        for f in t.get("frames", ())
        if (f.get("filename"), f.get("name")) == (place.file, place.function)
    ]
    known = {v["name"]: str(v.get("repr") or "") for v in (frames[0].get("locals") or () if frames else ())}
    return [Value(place.line, name, shown) for name in names if (shown := plain(known.get(name, "")))]


def plain(text: str) -> str:
    """A number, a text or a list of them, cut; empty for everything else, and for a text that looks like a secret."""
    if '"' in text and _LOOKS_SECRET.search(text):
        return ""
    words = re.findall(r"[A-Za-z_]\w*", text) if not text.startswith(('"', "'")) else []
    is_plain = bool(_PLAIN.fullmatch(text)) and all(w in _WORDS or re.fullmatch(r"e\d*", w) for w in words)
    if not text or not (is_plain or _is_list_of_texts(text)):
        return ""
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 3] + "..."


def _is_list_of_texts(text: str) -> bool:
    return bool(re.fullmatch(r"""[\[(]("[^"<]*"(, )?)*[\])]""", text))


def _is_in(rank: Rank, place: Place) -> bool:
    main = main_stack(rank.stacks)
    return main is not None and any((f.file, f.function) == (place.file, place.function) for f in main.frames)
