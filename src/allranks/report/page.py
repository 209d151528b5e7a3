"""How does a report look as one page? HTML with everything inside: styles, scripts, numbers; it asks no network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources

from allranks.perf.breakdown import PARTS
from allranks.report import page_parts, plots, words
from allranks.report.making import Report, Times
from allranks.report.markup import Html, behind, join, table, tag
from allranks.report.moments import NAMES, seconds_short

SCRIPTS = ("plot.js", "lines.js", "ranks.js", "page.js")
MOST_ROWS = 200
"""Of the table behind a plot."""


def as_page(report: Report) -> str:
    """The whole page."""
    lines = plots.line_plots(report)
    times = report.times
    stack, heat = (plots.stack(times), plots.heat(times)) if times else (None, None)
    steps = plots.steps(report)
    data = {"lines": [p.to_json() for p in lines], "stack": stack, "heat": heat, "steps": steps}
    first, others = (
        [p for p in lines if not p.id.startswith("metric-")],
        [p for p in lines if p.id.startswith("metric-")],
    )
    sections = [
        page_parts.knowing(report),
        _stack_figure(times) if times and stack else None,
        tag("div", [_line_figure(p) for p in first], class_="pair", id="curves") if first else None,
        _heat_figure(times, heat, bool(steps)) if times and heat else None,
        _steps_figure(steps) if steps else None,
        tag("div", [_line_figure(p) for p in others], class_="pair", id="metrics") if others else None,
        page_parts.metrics(report),
        page_parts.ranks_output(report),
        page_parts.about(report),
    ]
    body = [
        tag("a", "to the plots", href="#main", class_="skip"),
        page_parts.head(report),
        page_parts.contents(_ids(sections)),
        page_parts.tiles(report),
        tag("main", sections, id="main"),
    ]
    return _document(report, join(body), data)


def _ids(sections: list[Html | None]) -> list[str]:
    """The ids of the sections that are there, as their first tags have them."""
    return [found.group(1) for s in sections if s and (found := re.match(r'<[^>]* id="([a-z]+)"', s))]


def _document(report: Report, body: Html, data: object) -> str:
    style = _asset("page.css")
    script = "".join(_asset(name) for name in SCRIPTS)
    # Nothing may be loaded or run that is not in this file, also if something a run logged found a way past the escaping.
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:"
    policy += "; base-uri 'none'; form-action 'none'"
    # "</script" and "<!--" would end the block; escaped in JSON they are the same text.
    numbers = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content="allranks report"),
        tag("title", f"{report.facts.name}: {words.state_text(report.facts)}"),
        Html('<link rel="icon" href="data:,">'),
        Html(f"<style>{style}</style>"),
    ]
    ends = [
        Html(f'<script type="application/json" id="data">{numbers}</script>'),
        Html(f"<script>{script}</script>"),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body, ends), lang='en')}\n"


def _asset(name: str) -> str:
    return (resources.files("allranks.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _figure(
    id: str, title: str, about: str, *after: object, before: object = None, controls: object = None, keys: str
) -> Html:
    caption = tag(
        "figcaption",
        tag("h2", title, id=f"{id}-title"),
        tag("span", controls, class_="controls") if controls else None,
        tag("p", about),
    )
    plot = tag("div", class_="plot", tabindex=0, role="group", aria_label=f"{title}. {keys}")
    says = tag("p", "Point at it, or use the arrow keys.", class_="says hint", aria_live="polite")
    return tag("figure", caption, before, plot, says, after, id=id)


def _line_figure(plot: plots.LinePlot) -> Html:
    log = (
        tag("button", "log scale", type="button", class_="log", aria_pressed="false")
        if plot.can_log
        else None
    )
    xs = sorted({x for _, points in plot.series for x, _ in points})
    every = -(-len(xs) // MOST_ROWS)
    of = [dict(points) for _, points in plot.series]
    rows = [[f"{x:,.10g}", *(_cell(y, x) for y in of)] for x in xs[::every]]
    legend = None
    if len(plot.series) > 1:
        legend = tag(
            "ul",
            [tag("li", _line_swatch(k), name) for k, (name, _) in enumerate(plot.series)],
            class_="legend",
        )
    name = f"the numbers (each {every}th)" if every > 1 else "the numbers"
    head = [plot.x_name if plot.x_unit != "clock" else "seconds", *(n for n, _ in plot.series)]
    return _figure(
        plot.id,
        plot.title,
        plot.about,
        legend,
        behind(name, table(head, rows)),
        controls=log,
        keys="Arrow keys move the cursor.",
    )


def _cell(values: dict, x: float) -> str:
    if x not in values:
        return ""
    value = values[x]
    return "not finite" if value is None else f"{value:.6g}"


def _line_swatch(k: int) -> Html:
    return Html(
        f'<svg viewBox="0 0 14 14" aria-hidden="true"><path class="curve c{k % 8}" d="M0 7H14"/></svg>'
    )


def _part_legend(parts: list[str], names: dict[str, str]) -> Html:
    swatch = (
        '<svg viewBox="0 0 14 14" aria-hidden="true"><rect class="part p-{}" width="14" height="14"/></svg>'
    )
    return tag("ul", [tag("li", Html(swatch.format(p)), names[p]) for p in parts], class_="legend")


def _stack_figure(times: Times) -> Html:
    ranks = [r for r in times.parts.ranks if r.steps]
    used = [p for p in PARTS if any(r.per_step(p) > 0 for r in ranks)]
    names = plots.rank_names(times, [r.rank for r in ranks])
    rows = [
        [name, seconds_short(r.step_s), *(f"{r.per_step(p) * 1e3:.3g}" for p in used)]
        for name, r in zip(names, ranks, strict=True)
    ]
    about = (
        f"The mean of {ranks[0].steps:,} steps, the first step left out. The parts add up to the step."
        " Waiting is the time until the last rank came to the gradient exchange: it is not the waiting rank's fault."
    )
    if len(ranks) > plots.MOST_RANKS:
        about += f" Shown are the {plots.MOST_RANKS} of {len(ranks)} ranks that do most themselves."
    head = ["rank", "step", *(f"{PARTS[p]} (ms)" for p in used)]
    return _figure(
        "stack",
        "Where the time of a step goes",
        about,
        _part_legend(used, PARTS),
        behind("the numbers", table(head, rows)),
        keys="Arrow keys go from part to part.",
    )


def _heat_figure(times: Times, heat: dict, has_steps: bool) -> Html:
    choice = tag("select", [tag("option", k["name"]) for k in heat["kinds"]], id="heat-kind")
    controls = [tag("label", "shown:", for_="heat-kind"), choice]
    about = "A row per rank, time from left to right; darker, in the dark theme brighter, is longer."
    if has_steps:
        about += " Choosing a cell shows the nearest recorded step below."
    head = ["rank", "from (s)", "to (s)", *(f"{k['name']} (ms)" for k in heat["kinds"])]
    rows = [
        [row["name"], f"{a:.1f}", f"{b:.1f}", *(f"{row['values'][k['key']][c]:.4g}" for k in heat["kinds"])]
        for row in heat["rows"]
        for c, (a, b) in enumerate(row["spans"])
    ]
    every = -(-len(rows) // (3 * MOST_ROWS))
    name = f"the numbers (each {every}th)" if every > 1 else "the numbers"
    return _figure(
        "heat",
        "Ranks over time",
        about,
        tag("div", class_="scale", aria_hidden="true"),
        behind(name, table(head, rows[::every])),
        controls=controls,
        keys="Arrow keys go from cell to cell" + (", Enter shows the step." if has_steps else "."),
    )


def _steps_figure(steps: dict) -> Html:
    shown = steps["steps"]
    lengths = [_length(one) for one in shown]
    typical = sorted(range(len(shown)), key=lambda k: lengths[k])[len(shown) // 2]
    longest = max(range(len(shown)), key=lambda k: lengths[k])
    options = [
        tag(
            "option",
            f"step {one['step']:,} ({seconds_short(lengths[k] / 1e3)}{', the longest' if k == longest else ''})",
            selected=k == typical,
        )
        for k, one in enumerate(shown)
    ]
    controls = [
        tag("button", "<", type="button", class_="turn", aria_label="step before"),
        tag("label", "step", for_="step-shown"),
        tag("select", options, id="step-shown"),
        tag("button", ">", type="button", class_="turn", aria_label="next step"),
    ]
    used = {part for one in shown for rank in one["ranks"] for part, _, _ in rank["parts"]}
    about = (
        "What each rank did from the end of the step before to the end of this one. The dashed line joins the moments at which"
        " the ranks' gradients were there: who is furthest right is waited for. Below a rank: collectives that the script called."
    )
    body = tag("table", tag("thead", tag("tr", tag("th", "what"))), tag("tbody"), class_="text")
    return _figure(
        "steps",
        "One step on all ranks",
        about,
        _part_legend([p for p in NAMES if p in used], NAMES),
        behind("the numbers", tag("div", body, class_="scroll", tabindex=0)),
        before=tag("p", class_="note"),
        controls=controls,
        keys="Arrow keys go from part to part.",
    )


def _length(one: dict) -> float:
    return max(part[2] for rank in one["ranks"] for part in rank["parts"])
