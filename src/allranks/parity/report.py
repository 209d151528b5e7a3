"""How is the result of a comparison told? As a table for people, as JSON for programs, and as a plot of both losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from allranks.parity.causes import Finding
from allranks.parity.compare import Comparison
from allranks.parity.recording import Recording

SCHEMA = "allranks-parity/1"
WIDTH, HEIGHT, MARGIN = 640, 320, 48


def as_json(
    one: Recording, many: Recording, result: Comparison, finding: Finding | None, notes: Sequence[str]
) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "schema": SCHEMA,
        "equal": finding is None,
        "ranks": [one.world_size, many.world_size],
        "updates": list(result.counts),
        "equal_updates": result.equal_updates,
        "tolerance": result.tolerance,
        "largest_difference": {"weights": _gap(result.largest), "gradients": _gap(result.largest_gradient)},
        "cause": None
        if finding is None
        else {
            "code": finding.code,
            "what": finding.what,
            "why": finding.why,
            "fix": finding.fix,
            "update": finding.update,
            "tensor": finding.tensor,
            "rank": finding.rank,
        },
        "losses": {"one": result.losses[0], "many": result.losses[1]},
        "notes": list(notes),
    }


def _gap(gap: Any) -> dict[str, Any]:
    return {"size": gap.size, "update": gap.update, "tensor": gap.tensor}


def as_text(
    one: Recording, many: Recording, result: Comparison, finding: Finding | None, notes: Sequence[str]
) -> str:
    """Everything, for people: a table of the updates, then the sentence that counts."""
    lines = [*_table(one, many, result, finding), ""]
    lines += [f"note: {note}" for note in notes]
    gap, gradient = result.largest, result.largest_gradient
    measured = (
        f"largest relative difference {gap.size:.2g} of a weight ({gap.tensor}, update {gap.update}), "
        f"{gradient.size:.2g} of a gradient ({gradient.tensor}, update {gradient.update})"
    )
    if finding is None:
        lines.append(f"equal for {_updates(result.equal_updates)} on 1 rank and on {many.world_size}")
        lines.append(f"  {measured}")
        return "\n".join(lines)
    lines.append(f"{finding.code} {finding.what}")
    place = f"update {finding.update}" + (f", {finding.tensor}" if finding.tensor else "")
    lines.append(f"  where: {place}" + (f", rank {finding.rank}" if finding.rank is not None else ""))
    lines += [f"  why:   {finding.why}"] if finding.why else []
    lines += [f"  fix:   {finding.fix}", f"  more:  allranks explain {finding.code}"]
    if result.equal_updates:
        lines.append(f"equal before, for {_updates(result.equal_updates)}: {measured}")
    return "\n".join(lines)


def _table(one: Recording, many: Recording, result: Comparison, finding: Finding | None) -> list[str]:
    """The first updates, the last equal one and the one that differs."""
    rows = [
        f"{'update':>6}  {'samples':>11}  {'loss on 1 rank':>16}  {'loss on ' + str(many.world_size) + ' ranks':>16}"
    ]
    last = min(result.equal_updates + 1, *result.counts) if finding is not None else result.equal_updates
    numbers = sorted({*range(1, min(4, last + 1)), *range(max(1, last - 1), last + 1)})
    for before, number in zip([0, *numbers], numbers, strict=False):
        if number > before + 1:
            rows.append(f"{'...':>6}")
        counts = [
            sum(batch.count for rank in run.ranks for batch in rank.steps[number - 1].batches)
            for run in (one, many)
        ]
        losses = [_number(values[number - 1]) for values in result.losses]
        mark = "  <- differs" if number > result.equal_updates else ""
        told = str(counts[0]) if counts[0] == counts[1] else f"{counts[0]} / {counts[1]}"
        rows.append(f"{number:>6}  {told:>11}  {losses[0]:>16}  {losses[1]:>16}{mark}")
    return rows


def _updates(n: int) -> str:
    return f"{n} update{'s' * (n != 1)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"


def as_svg(result: Comparison, world_size: int, finding: Finding | None) -> str:
    """Both loss curves, and a line where they part."""
    curves = [[v for v in values if v is not None and v == v] for values in result.losses]
    every = [v for curve in curves for v in curve] or [0.0]
    low, high = min(every), max(every)
    count = max(2, *(len(curve) for curve in curves))

    def x(k: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * k / (count - 1)

    def y(v: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (v - low) / ((high - low) or 1.0)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="#444"/>',
        f'<text x="4" y="{y(high):.0f}">{high:.3g}</text><text x="4" y="{y(low):.0f}">{low:.3g}</text>',
        f'<text x="{MARGIN}" y="{HEIGHT - 16}">update 1</text><text x="{WIDTH - 2 * MARGIN}" y="{HEIGHT - 16}">update {count}</text>',
    ]
    names = ("1 rank", f"{world_size} ranks")
    # The second is dashed: where the runs are equal, the first shows through.
    for k, (curve, color, dash) in enumerate(zip(curves, ("#1f77b4", "#d62728"), ("", "6 4"), strict=True)):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(curve))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        parts.append(
            f'<text x="{WIDTH - 2 * MARGIN}" y="{20 + 16 * k}" fill="{color}">loss on {names[k]}</text>'
        )
    if finding is not None and finding.update:
        at = x(min(finding.update, count) - 1)
        parts.append(f'<path d="M{at:.1f} {MARGIN}V{HEIGHT - MARGIN}" stroke="#444" stroke-dasharray="2 3"/>')
        parts.append(f'<text x="{at + 4:.1f}" y="{MARGIN + 12}">{finding.code}</text>')
    return "\n".join([*parts, "</svg>", ""])
