"""How is a comparison shown? A table with bars for a terminal, JSON, and a drawing that needs nothing else."""

from __future__ import annotations

import math
from dataclasses import asdict
from html import escape
from typing import Any

from allranks.bench.rounds import Answer, Row

BAR = 24
FORMAT = "allranks-bench/1"


def as_text(answer: Answer, script: str) -> str:
    """The table, with bars of what is done in a second; then what failed, and how sure all this is."""
    good = [row for row in answer.rows if not row.failure]
    most = max((row.per_s for row in good), default=1.0)
    heads = (
        "ranks",
        "strategy",
        f"{answer.unit}/s",
        "",
        "ms a step",
        "sure",
        "efficiency",
        "exchange",
        "MB a rank",
    )
    lines: list[tuple[str, ...]] = [heads]
    for row in good:
        bar = "#" * max(1, round(BAR * row.per_s / most))
        lines.append(
            (
                str(row.setting.ranks),
                row.setting.strategy,
                f"{row.per_s:.4g}",
                bar,
                f"{row.step_s * 1e3:.4g}",
                _sure(row),
                "" if row.efficiency is None else f"{row.efficiency:.0%}",
                "?" if row.exchange_s is None else f"{row.exchange_s / row.step_s:.0%}",
                f"{row.rss_mb:.0f}" + (f" + {row.cuda_mb:.0f} GPU" if row.cuda_mb is not None else ""),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    table = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    told = [f"{script}", "", *table, "", *_notes(answer, good)]
    for row in answer.rows:
        if row.failure:
            told += ["", f"{row.setting}: no figure", *(f"    {line}" for line in row.failure.splitlines())]
    return "\n".join(told)


def _sure(row: Row) -> str:
    inside = "few steps" if math.isinf(row.sure) else f"+-{row.sure:.1%}"
    return inside + (f", rounds {row.apart:.0%} apart" if row.rounds > 1 else "")


def _notes(answer: Answer, good: list[Row]) -> list[str]:
    notes = [
        "sure: half width of the interval of the median step, and how far the rounds lie apart; settings closer than that are alike.",
        "exchange: share of a step in which gradients were on their way, or a slower rank was waited for, and nothing else was done.",
    ]
    if answer.unit == "samples":
        notes.append("efficiency: samples a second, against as many times those of one rank.")
    else:
        notes.append("No loader was seen, so there are steps a second, and no efficiency.")
    if any(row.apart > 0.1 for row in good):
        notes.append(
            "Rounds lie more than 10 % apart: other work was on this machine, or the script's own steps differ."
        )
    return notes


def as_json(answer: Answer, script: str, args: tuple[str, ...]) -> dict[str, Any]:
    """Everything, for programs."""
    rows = []
    for row in answer.rows:
        values = asdict(row)
        setting = values.pop("setting")
        values["sure"] = None if math.isinf(values["sure"]) else values["sure"]
        rows.append({"ranks": setting["ranks"], "strategy": setting["strategy"], **values})
    return {"format": FORMAT, "script": script, "args": list(args), "unit": answer.unit, "rows": rows}


_COLOURS = ("#3366aa", "#cc6633", "#339966", "#993399", "#777777", "#aa3333", "#667700")


def as_svg(answer: Answer, script: str) -> str:
    """Samples a second over ranks, a line per strategy, and the line of N x one rank."""
    good = [row for row in answer.rows if not row.failure]
    width, height, left, low = 560, 360, 70, 310
    most_ranks = max((row.setting.ranks for row in good), default=1)
    one = next(
        (row.per_s for row in good if row.setting.ranks == 1 and row.setting.strategy == "script"), None
    )
    most = max([row.per_s for row in good] + ([one * most_ranks] if one else []), default=1.0) or 1.0

    def at(ranks: float, per_s: float) -> str:
        return f"{left + (ranks - 0.5) * (width - left - 150) / most_ranks:.1f},{low - per_s / most * (low - 40):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/><text x="{left}" y="20">{escape(script)}</text>',
        f'<path d="M{left},40 V{low} H{width - 140}" fill="none" stroke="#000"/>',
        f'<text x="{left - 6}" y="44" text-anchor="end">{most:.3g}</text><text x="{left - 6}" y="{low}" text-anchor="end">0</text>',
        f'<text x="{left}" y="{low + 36}">ranks; {answer.unit} a second</text>',
    ]
    for ranks in sorted({row.setting.ranks for row in good}):
        x = at(ranks, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{low + 16}" text-anchor="middle">{ranks}</text>')
    if one:
        ideal = f"{at(1, one)} {at(most_ranks, one * most_ranks)}"
        parts.append(f'<polyline points="{ideal}" fill="none" stroke="#aaa" stroke-dasharray="4"/>')
    for place, strategy in enumerate(dict.fromkeys(row.setting.strategy for row in good)):
        colour = _COLOURS[place % len(_COLOURS)]
        rows = sorted((r for r in good if r.setting.strategy == strategy), key=lambda r: r.setting.ranks)
        points = [at(r.setting.ranks, r.per_s) for r in rows]
        if strategy != "script" and one:
            points = [at(1, one), *points]
        parts.append(
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in points
        ]
        parts.append(
            f'<text x="{width - 130}" y="{60 + 18 * place}" fill="{colour}">{escape(strategy)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])
