"""Which other lines of the program belong to an error, though its traceback does not hold them? Looked up where the source lies."""

from __future__ import annotations

import re
from collections.abc import Iterable

from allranks.watch.evidence import Rank
from allranks.watch.reading import source_of
from allranks.watch.stacks import user_frames
from allranks.watch.verdict import Place

MOST = 6
_WRAPPED = re.compile(r"(\w+)\s*=\s*(?:\w+\.)*(?:DDP|DistributedDataParallel)\(")
_TWICE = re.compile(r"mark a variable ready only once|marked as ready twice")
_NO_GRADIENT = re.compile(r"Expected to have finished reduction in the prior iteration")
_WRAP = r"\b(?:DDP|DistributedDataParallel)\("
_FREEZE = r"\brequires_grad(?:_\(\s*False|\s*=\s*False)"
_BREAKPOINT = r"\bbreakpoint\(\)|\bset_trace\("
UNKNOWN_RANK = re.compile(r"error: unrecognized arguments:.*--local[-_]rank")


def related_lines(rank: Rank) -> tuple[Place, ...]:
    """The lines, in the order in which they should be read."""
    failure, record = rank.failure, rank.record
    if failure is not None and _TWICE.search(failure.message):
        return tuple(_of_two_passes(dict.fromkeys(f.file for f in user_frames(failure.frames))))
    if failure is not None and _NO_GRADIENT.search(failure.message):
        return tuple(_frozen_after_wrapping(dict.fromkeys(f.file for f in user_frames(failure.frames))))
    if failure is not None and failure.kind == "BdbQuit":
        # Raised at the line that comes after, perhaps the head of a loop.
        found = _matching(dict.fromkeys(f.file for f in user_frames(failure.frames)), _BREAKPOINT)
        return tuple(p for p in found if not p.code.startswith("#"))[:MOST]
    if any(UNKNOWN_RANK.search(line) for line in rank.output) and record is not None and record.exit_where:
        return tuple(_matching([record.exit_where.file], r"add_argument\(.*--local[-_]rank"))
    return ()


def _of_two_passes(files: Iterable[str]) -> list[Place]:
    """A checkpoint, the flag, and the forwards of the wrapped model."""
    files = list(files)
    found = _matching(files, r"\bcheckpoint(_sequential)?\(|find_unused_parameters\s*=\s*True")
    names = [m for file in files for m in _WRAPPED.findall(source_of(file))]
    for name in dict.fromkeys(names):
        found += [p for p in _matching(files, rf"\b{re.escape(name)}\(") if p not in found]
    return found[:MOST]


def _frozen_after_wrapping(files: Iterable[str]) -> list[Place]:
    """Lines that freeze parameters, below the line of their file that gives the model to DDP, and that line."""
    for file in files:
        wraps = [p for p in _matching([file], _WRAP) if not p.code.startswith(("#", "import ", "from "))]
        late = [
            p
            for p in _matching([file], _FREEZE)
            if wraps and p.line > wraps[0].line and not p.code.startswith("#")
        ]
        if late:
            return [*late[:MOST], wraps[0]]
    return []


def _matching(files: Iterable[str], pattern: str) -> list[Place]:
    return [
        Place(file, n, "", line.strip())
        for file in files
        for n, line in enumerate(source_of(file).splitlines(), 1)
        if re.search(pattern, line)
    ]
