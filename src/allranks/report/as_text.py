"""How is a report read in a terminal? Paragraphs and one table; rich where it is a terminal, plain text elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allranks.perf.breakdown import PARTS
from allranks.perf.view import Cause
from allranks.report import plots, words
from allranks.report.making import Report, Times

MOODS = {"ended": "bold green", "failed": "bold red", "killed": "bold red"}
MOST_RANKS = 16
"""Rows of the table; of more ranks the slowest ones are shown."""
MOST_VERDICTS = 6
PLAIN_WIDTH = 160
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SMALL_SHARE = 0.005
"""Parts below it everywhere are not worth a column."""


def as_text(report: Report, *, width: int | None = None, color: bool = False) -> str:
    """The whole report.

    Args:
        width: Columns of the terminal; None where it is none.
    """
    out = io.StringIO()
    console = Console(
        file=out,
        width=width or PLAIN_WIDTH,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        highlight=False,
        soft_wrap=False,
        legacy_windows=False,
    )
    _write(report, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _text(text: str, style: str = "") -> Text:
    """A logged name or a verdict as it is, but without the control codes that would speak to the terminal."""
    return Text(CONTROL.sub("?", text), style=style)


def _write(report: Report, console: Console) -> None:
    facts = report.facts
    head = _text(facts.name, style="bold")
    head.append_text(_text(" " + words.ending_text(facts), style=MOODS.get(facts.state, "bold yellow")))
    console.print(head)
    _rows(
        console,
        [
            ("run", str(facts.path)),
            ("values in", str(facts.trained) if facts.trained != facts.path else ""),
            ("what", words.about_text(facts)),
            ("command", facts.command),
            ("started", words.when_text(facts.started)),
        ],
    )
    _verdicts(report, console)
    if report.times is not None:
        _times(report.times, console)
        _causes(report.times, console)
    _logged(report, console)
    if report.missing:
        console.print("\nnot known", style="bold")
        for text in report.missing:
            console.print(_text(f"  {text}"))


def _rows(console: Console, rows: list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in rows:
        if text:
            grid.add_row(f"  {name}", _text(text))
    console.print(grid)


def _verdicts(report: Report, console: Console) -> None:
    told = report.facts.verdicts
    if not told:
        return
    console.print("\nsaid while it ran", style="bold")
    for one in told[:MOST_VERDICTS]:
        verdict = one.verdict
        again = f" (said {one.times} times)" if one.times > 1 else ""
        console.print(_text(f"  {verdict.head()}{again}", style="red"))
        rows = [(label, text) for label, text in verdict.lines() if label in ("where", "do")]
        firsts = {label: text for label, text in reversed(rows)}
        more = f"allranks explain {verdict.code}" + (f"; {one.page}" if one.page else "")
        _rows(
            console, [*((f"  {label}", firsts.get(label, "")) for label in ("where", "do")), ("  more", more)]
        )
    if len(told) > MOST_VERDICTS:
        console.print(_text(f"  and {len(told) - MOST_VERDICTS} more in {report.facts.path / 'diagnosis'}"))


def _times(times: Times, console: Console) -> None:
    speed = words.speed_text(times)
    console.print("\nwhere the time of a step goes", style="bold")
    starting = words.starting_text(times)
    if not times.parts.ranks:
        console.print(_text(f"  {starting}"))
        console.print(_text(f"  {words.steps_done(times)} steps: too few to say"))
        return
    text = f"  {words.steps_done(times):,} steps, {words.step_text(times)} each (median)"
    console.print(_text(text + (f", {speed}" if speed else "")))
    console.print(_parts_table(times))
    if straggler := words.straggler_text(times):
        console.print(_text(f"  {straggler}", style="bold" if times.straggler else ""))
    if starting:
        console.print(_text(f"  {starting}"))
    if first := words.first_step_text(times):
        console.print(_text(f"  {first}"))


def _causes(times: Times, console: Console) -> None:
    _found("what makes it slower than it need be", times.causes, console)
    _found("numbers to doubt", times.remarks, console)


def _found(title: str, causes: Sequence[Cause], console: Console) -> None:
    if not causes:
        return
    console.print(f"\n{title}", style="bold")
    for cause in causes:
        console.print(_text(f"  {cause.code} {cause.title}", style="yellow"))
        rows = [("  why", fact) for fact in cause.facts[:1]] + [("     ", fact) for fact in cause.facts[1:4]]
        _rows(console, [*rows, ("  do", cause.fix), ("  more", f"allranks explain {cause.code}")])


def _parts_table(times: Times) -> Table:
    ranks = [r for r in times.parts.ranks if r.steps]
    shown = ranks
    if len(ranks) > MOST_RANKS:
        slowest = sorted(ranks, key=plots.own_s, reverse=True)[:MOST_RANKS]
        shown = sorted(slowest, key=lambda r: r.rank)
    used = [p for p in PARTS if any(r.share(p) >= SMALL_SHARE for r in ranks)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("  ms a step", no_wrap=True)
    for name in ("step", *(PARTS[p] for p in used)):
        table.add_column(name, justify="right", vertical="bottom")
    worst = max(ranks, key=plots.own_s).rank if len(ranks) > 1 else None
    for name, rank in zip(plots.rank_names(times, [r.rank for r in shown]), shown, strict=True):
        cells = [f"{rank.step_s * 1e3:.4g}", *(f"{rank.per_step(p) * 1e3:.3g}" for p in used)]
        table.add_row(_text(f"  {name}"), *cells, style="bold" if rank.rank == worst else "")
    if len(ranks) > len(shown):
        table.add_row(
            _text(f"  {len(ranks) - len(shown)} more ranks do less themselves"), *[""] * (len(used) + 1)
        )
    return table


def _logged(report: Report, console: Console) -> None:
    rows = words.metric_rows(report)
    if rows:
        console.print("\nlogged values", style="bold")
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        for name in ("  value", "last", "best", ""):
            table.add_column(name, overflow="fold")
        for name, *rest in rows[:40]:
            table.add_row(_text(f"  {name}"), *map(_text, rest))
        console.print(table)
    kept = report.facts.checkpoints
    if kept:
        console.print("\ncheckpoints", style="bold")
        there = [c for c in kept if c.size_bytes is not None]
        console.print(
            _text(
                f"  {len(kept)} written, {len(there)} there; the last: {kept[-1].folder}, step {kept[-1].step:,}"
            )
        )
