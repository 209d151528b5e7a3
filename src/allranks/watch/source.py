"""What does the source say around a line: its text, the rank guard it stands under, the loop it is in?

Reads source text that it is given; where the file is gone or not Python, it says nothing.
"""

from __future__ import annotations

import ast
import re
from functools import lru_cache

_RANK_TEST = re.compile(
    r"rank|is_main|is_master|is_zero|master_process|main_process|primary|should_save", re.I
)


_EXITS = ("exit", "_exit", "abort", "quit", "kill")


@lru_cache(maxsize=8)
def _tree(source: str) -> ast.Module | None:
    """What the source says, None if it is not Python; kept, since a look asks some fifteen times a rank (50 ms in 7,000 lines)."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None


def line_text(source: str, line: int) -> str:
    """The text of a line, stripped; of a statement over several lines, the first of them."""
    lines = source.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


@lru_cache(maxsize=256)
def rank_guard(source: str, line: int) -> int | None:
    """The line of the innermost `if` around `line` whose test looks at the rank, or None."""
    if (tree := _tree(source)) is None:
        return None
    found: int | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            body = node.body if isinstance(node.body, list) else [node.body]
            other = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            inside = any(_holds(part, line) for part in [*body, *other])
            if (
                inside
                and _RANK_TEST.search(ast.unparse(node.test))
                and (found is None or node.lineno > found)
            ):
                found = node.lineno
    return found


@lru_cache(maxsize=256)
def inner_condition(source: str, first: int, line: int) -> int | None:
    """The line of the innermost `if` around `line` that begins after line `first`, or None."""
    if (tree := _tree(source)) is None:
        return None
    around = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.If)
        and n.lineno > first
        and any(_holds(part, line) for part in [*n.body, *n.orelse])
    ]
    return max(around, default=None)


@lru_cache(maxsize=256)
def condition(source: str, line: int) -> int | None:
    """The line of the innermost `if` or `while` around `line`, in the innermost function that holds it, or None."""
    holder: ast.AST | None = _tree(source)
    found: int | None = None
    while holder is not None:
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            found = None
        elif isinstance(holder, ast.If | ast.While) and any(
            _holds(n, line) for n in (*holder.body, *holder.orelse)
        ):
            found = holder.lineno
        holder = next((n for n in ast.iter_child_nodes(holder) if _holds(n, line)), None)
    return found


@lru_cache(maxsize=256)
def is_cleanup(source: str, line: int) -> bool:
    """Whether a line is in an `except` or `finally`."""
    if (tree := _tree(source)) is None:
        return False
    tries = [n for n in ast.walk(tree) if isinstance(n, ast.Try)]
    return any(_holds(part, line) for n in tries for part in (*n.handlers, *n.finalbody))


Handler = tuple[int, tuple[str, ...], bool]
"""Line, names of what it takes (none: everything), whether the program goes on after it."""


@lru_cache(maxsize=256)
def handlers(source: str, line: int) -> tuple[tuple[Handler, ...], ...]:
    """The `except` of each `try` around `line`, in the innermost function that holds it; the innermost `try` first."""
    holder: ast.AST | None = _tree(source)
    found: list[tuple[Handler, ...]] = []
    while holder is not None:
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            found = []
        elif isinstance(holder, ast.Try) and any(_holds(part, line) for part in holder.body):
            found.insert(
                0, tuple((h.lineno, _names(h.type), not any(map(_ends, h.body))) for h in holder.handlers)
            )
        holder = next((n for n in ast.iter_child_nodes(holder) if _holds(n, line)), None)
    return tuple(found)


def _names(kind: ast.expr | None) -> tuple[str, ...]:
    """'RuntimeError' of `except torch.cuda.RuntimeError`."""
    parts = kind.elts if isinstance(kind, ast.Tuple) else [] if kind is None else [kind]
    return tuple(ast.unparse(part).rpartition(".")[2] for part in parts)


def _ends(statement: ast.stmt) -> bool:
    """Whether it ends the program, or passes the error on; what stands under a condition may not."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func).rpartition(".")[2] in _EXITS
    return isinstance(statement, ast.Raise)


def ways_out(source: str, first: int, last: int) -> list[int]:
    """The lines of those `if` between two lines that hold a `break` or `return` themselves."""
    if (tree := _tree(source)) is None:
        return []
    return sorted(
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.If)
        and first < n.lineno <= last
        and any(isinstance(part, ast.Break | ast.Return) for part in n.body)
    )


@lru_cache(maxsize=256)
def outer_loop(source: str, line: int) -> tuple[int, int] | None:
    """First and last line of the outermost loop around `line` in the innermost function that holds it, or None."""
    holder: ast.AST | None = _tree(source)
    found: tuple[int, int] | None = None
    while holder is not None:
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            found = None  # what is outside of the function is its caller's
        elif isinstance(holder, ast.For | ast.AsyncFor | ast.While) and found is None:
            found = (holder.lineno, holder.end_lineno or holder.lineno)
        holder = next((n for n in ast.iter_child_nodes(holder) if _holds(n, line)), None)
    return found


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return first <= line <= (last or first)
