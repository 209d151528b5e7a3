"""How is HTML written so that nothing a run logged becomes part of the page's structure? Text is escaped unless it is Html."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

Child = object
"""A string (escaped), an Html (as it is), a number, None (nothing), or several of these."""
_VOID = frozenset({"meta", "br"})


class Html(str):
    """Markup that is finished."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element; class_ and for_ lose their underscore, other underscores are hyphens; True is a bare attribute."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {key}")
        elif value is not None and value is not False:
            parts.append(f' {key}="{html.escape(str(value))}"')
    opened = "".join(parts) + ">"
    return Html(opened if name in _VOID else f"{opened}{join(children)}</{name}>")


def join(children: Iterable[Child]) -> Html:
    """Children one after the other."""
    return Html("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, (list, tuple)):
        return join(child)
    return html.escape(str(child))


def table(
    head: Sequence[str], rows: Sequence[Sequence[Child]], *, is_text: bool = False, worst: int | None = None
) -> Html:
    """A table that scrolls within itself where it is too wide.

    Args:
        worst: The row to mark.
    """
    lines = [
        tag("tr", [tag("td", cell) for cell in row], class_="worst" if k == worst else None)
        for k, row in enumerate(rows)
    ]
    whole = tag(
        "table",
        tag("thead", tag("tr", [tag("th", name, scope="col") for name in head])),
        tag("tbody", lines),
        class_="text" if is_text else None,
    )
    return tag("div", whole, class_="scroll", tabindex=0)


def behind(name: str, content: Html) -> Html:
    """Content that opens on demand."""
    return tag("details", tag("summary", name), content)
