"""What does the source say around a line: its text, and the rank guard it stands under?

Reads source text that it is given; where the file is gone or not Python, it says nothing.
"""

from __future__ import annotations

import ast
import re

_RANK_TEST = re.compile(
    r"rank|is_main|is_master|is_zero|master_process|main_process|primary|should_save", re.I
)


def line_text(source: str, line: int) -> str:
    """The text of a line, stripped; of a statement over several lines, the first of them."""
    lines = source.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def rank_guard(source: str, line: int) -> int | None:
    """The line of the innermost `if` around `line` whose test looks at the rank, or None."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
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


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return first <= line <= (last or first)
