"""Which lines made the loss, and what do the fingerprints of the replicas stand for? Read when a look is taken, not ten times a second."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from allranks.record import page
from allranks.record.fingerprints import Sums, read_sums
from allranks.record.notes import read_notes
from allranks.watch.evidence import Record
from allranks.watch.observed import Check
from allranks.watch.reading import source_of, with_code
from allranks.watch.verdict import Place

MAX_SUMS = 8192
"""Numbers kept in the evidence of one rank; of a big model only the newest checks."""

_CALLED_ON = (  # the first that fits
    re.compile(r"scale\(\s*(\w+)\s*\)\s*\.backward\("),
    re.compile(r"backward\(\s*(\w+)\s*[,)]"),
    re.compile(r"\b(\w+)\.backward\("),
    re.compile(r"\.step\(\s*(\w+)\s*[,)]"),
)


def with_numbers(record: Record, found: page.Record) -> Record:
    """The evidence with the sums of each parameter, and with the lines that made a loss that is not finite."""
    bad = record.not_finite
    if bad is not None and bad.where is not None:
        bad = replace(bad, made=made_at(bad.where))
    names, sums = read_sums(found.path)
    most = max(4, MAX_SUMS // max(1, 2 * len(names)))
    checks = tuple(_with_sums(c, sums.get(c.step)) for c in record.checks[-most:])
    return replace(record, not_finite=bad, checks=checks, checked=names, noted=read_notes(found.path))


def with_notes(record: Record, found: page.Record) -> Record:
    """The evidence with what the process noted (record/notes.py)."""
    return replace(record, noted=read_notes(found.path))


def _with_sums(check: Check, sums: Sums | None) -> Check:
    return check if sums is None else replace(check, sums=sums.sums, changes=sums.changes)


def made_at(backward: Place) -> tuple[Place, ...]:
    """The lines above `backward`, in its function, that give the loss its value: the newest first."""
    named = next((found for pattern in _CALLED_ON if (found := pattern.search(backward.code))), None)
    name = named[1] if named else ""
    try:
        tree = ast.parse(source_of(backward.file)) if name else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        return ()
    lines = sorted(
        (n for n in _assigned(_scope(tree, backward.line), name) if n < backward.line), reverse=True
    )
    return tuple(with_code(replace(backward, line=n, code="")) for n in lines[:3])


def _scope(tree: ast.Module, line: int) -> ast.AST:
    """The innermost function around a line, else the module."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=tree)


def _assigned(scope: ast.AST, name: str) -> set[int]:
    """The lines on which `name` is given a value."""
    stores = {
        id(n): n
        for n in ast.walk(scope)
        if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)
    }
    return {n.lineno for n in stores.values()}
