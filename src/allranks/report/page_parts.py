"""What stands on the page beside the plots: the head, what one has to know, tables, what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.perf.view import Cause
from allranks.report import words
from allranks.report.facts import Told
from allranks.report.making import Report, Times
from allranks.report.markup import Html, behind, table, tag

MOODS = {"ended": "good", "failed": "bad", "killed": "bad", "running": "neutral", "unknown": "neutral"}
MOST_VERDICTS = 20
LINKS = {
    "known": "What to know",
    "stack": "Step time",
    "curves": "Loss and throughput",
    "heat": "Ranks over time",
    "steps": "One step",
    "metrics": "Other values",
    "logged": "Logged values and checkpoints",
    "output": "Output",
    "about": "About the run",
}
"""Sections by their ids, in their order."""


def head(report: Report) -> Html:
    """Name, state, what it was."""
    facts = report.facts
    top = tag(
        "header",
        tag("h1", facts.name),
        tag("span", words.state_text(facts), class_=f"state {MOODS[facts.state]}"),
        tag("span", _counted(facts.verdicts), class_="state bad") if facts.verdicts else None,
        tag("button", "dark", type="button", id="theme", aria_label="Change between light and dark"),
    )
    lines = [words.about_text(facts), f"started {words.when_text(facts.started)}", str(facts.path)]
    return tag(
        "div",
        top,
        tag("p", " \u00b7 ".join(line for line in lines if line), class_="sub"),
    )


def contents(ids: Sequence[str]) -> Html:
    """Links to the parts that there are."""
    there = [tag("a", name, href=f"#{id}") for id, name in LINKS.items() if id in ids]
    return tag("nav", there, aria_label="On this page")


def _counted(verdicts: Sequence[Told]) -> str:
    return f"{len(verdicts)} verdict{'s' * (len(verdicts) != 1)}: {', '.join(t.verdict.code for t in verdicts[:3])}"


def tiles(report: Report) -> Html:
    """The numbers that are asked for first."""
    facts, times = report.facts, report.times
    found: list[tuple[str, str]] = []
    if facts.wall_s is not None:
        found.append((words.length(facts.wall_s), "in all" if facts.state != "running" else "so far"))
    if facts.world_size:
        hosts = len(set(facts.hosts.values()))
        found.append((str(facts.world_size), f"ranks on {hosts} host{'s' * (hosts != 1)}"))
    if times is not None:
        found.append((f"{words.steps_done(times):,}", "optimizer steps"))
        if times.parts.median_step_s:
            found.append((words.step_text(times), "median step"))
        if speed := words.mean_speed(times):
            found.append((f"{speed:.3g}", "steps a second"))
        if samples := words.samples_a_second(times):
            found.append((f"{samples:,.0f}", "samples a second"))
    for series in list(facts.logged.series.values())[:12]:
        if best := series.best():
            found.append((words.value_text(best.value), f"best {series.name}"))
    return tag(
        "ul", [tag("li", tag("b", value), tag("span", name)) for value, name in found[:8]], class_="tiles"
    )


def knowing(report: Report) -> Html:
    """Verdicts, what is slow, and what cannot be said."""
    facts = report.facts
    out: list[Html] = [tag("h2", "What to know"), tag("p", words.ending_text(facts))]
    out += [_verdict(told) for told in facts.verdicts[:MOST_VERDICTS]]
    if len(facts.verdicts) > MOST_VERDICTS:
        out.append(tag("p", f"and {len(facts.verdicts) - MOST_VERDICTS} more in diagnosis/"))
    if report.times is not None:
        out += _slow(report.times) if report.times.parts.ranks else []
        out += [_finding(remark) for remark in report.times.remarks]
        starting = words.starting_text(report.times)
        said = [text for text in (starting, words.first_step_text(report.times)) if text]
        out += [tag("p", text[0].upper() + text[1:] + ".") for text in said]
    if report.missing:
        out += [
            tag("h3", "What this report cannot say"),
            tag("ul", [tag("li", text) for text in report.missing], class_="missing"),
        ]
    return tag("section", out, id="known")


def _slow(times: Times) -> list[Html]:
    """Where the time goes in a sentence, the straggler, and the causes with what to change."""
    out = [tag("p", f"Most of a step's time: {words.largest_text(times)}.")]
    if straggler := words.straggler_text(times):
        text = straggler[0].upper() + straggler[1:] + "."
        out.append(tag("p", tag("strong", text) if times.straggler else text))
    return [*out, *(_finding(cause) for cause in times.causes)]


def _finding(cause: Cause) -> Html:
    """What is slow, or to be doubted, and what to change."""
    facts = [[tag("dt", "why" if k == 0 else ""), tag("dd", fact)] for k, fact in enumerate(cause.facts)]
    fixes = [[tag("dt", "do"), tag("dd", cause.fix)]] if cause.fix else []
    return tag(
        "div",
        tag("p", tag("span", cause.code, class_="code"), f" {cause.title}", class_="head"),
        tag("dl", facts, fixes) if facts or fixes else None,
        class_="finding neutral",
    )


def _verdict(told: Told) -> Html:
    verdict = told.verdict
    rows = [(label, text) for label, text in verdict.lines() if label != "more"]
    items = [[tag("dt", label), tag("dd", text)] for label, text in rows]
    extra = [
        f"said {told.times} times" if told.times > 1 else "",
        f"stacks of all ranks: {told.page}" if told.page else "",
    ]
    return tag(
        "div",
        tag(
            "p",
            tag("span", verdict.code, class_="code"),
            f" {verdict.head().removeprefix(verdict.code).strip()}",
            class_="head",
        ),
        tag("pre", "\n".join(verdict.quoted)) if verdict.quoted else None,
        tag("dl", items) if items else None,
        tag("p", ", ".join(filter(None, extra))) if any(extra) else None,
        class_="finding bad",
    )


def metrics(report: Report) -> Html | None:
    """Last and best of each logged value, and the checkpoints."""
    rows, facts = words.metric_rows(report), report.facts
    out: list[Html] = []
    if rows:
        out += [tag("h2", "Logged values"), table(["value", "last", "best", ""], rows, is_text=True)]
        if facts.logged.num_replaced:
            text = f"{facts.logged.num_replaced} values of steps that were taken again after a resume are left out."
            out.append(tag("p", text))
    if facts.checkpoints:
        kept = [
            [
                c.folder,
                f"{c.step:,}",
                words.when_text(c.unix_time),
                words.size_text(c.size_bytes) if c.size_bytes is not None else "removed",
            ]
            for c in facts.checkpoints[-50:]
        ]
        out += [tag("h2", "Checkpoints"), table(["folder", "step", "written", "size"], kept, is_text=True)]
    return tag("section", out, id="logged") if out else None


def ranks_output(report: Report) -> Html | None:
    """The last lines of ranks that failed."""
    if not report.facts.tails:
        return None
    blocks = [
        behind(f"rank {rank}: its last lines", tag("pre", "\n".join(lines)))
        for rank, lines in report.facts.tails.items()
    ]
    return tag("section", tag("h2", "Output of ranks that failed"), blocks, id="output")


def about(report: Report) -> Html:
    """Command, hosts, attempts, events."""
    facts = report.facts
    rows: list[tuple[str, str]] = [
        ("command", facts.command or "not known"),
        ("folder", str(facts.about.get("cwd", "-"))),
        *([("values in", str(facts.trained))] if facts.trained != facts.path else []),
    ]
    for host in sorted(set(facts.hosts.values())):
        ranks = [r for r, h in facts.hosts.items() if h == host]
        rows.append(("host", f"{host}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"))
    out = [tag("h2", "About the run"), table(["", ""], [[k, tag("code", v)] for k, v in rows], is_text=True)]
    if len(facts.attempts) > 1:
        lines = [
            [
                f"{k + 1}",
                words.when_text(a.began),
                words.length(a.ended - a.began) if a.ended else "-",
                a.world_size,
                a.code or "-",
            ]
            for k, a in enumerate(facts.attempts)
        ]
        out += [tag("h3", "Attempts"), table(["", "began", "took", "ranks", "ended by"], lines, is_text=True)]
    events = [[words.when_text(e.unix_time), e.kind, _event_text(e.fields)] for e in facts.events[-100:]]
    if events:
        out.append(behind("events", table(["when", "what", ""], events, is_text=True)))
    return tag("section", out, id="about")


def _event_text(fields: object) -> str:
    text = ", ".join(f"{k} {v}" for k, v in dict(fields).items() if v not in ("", None)) if fields else ""  # pyright: ignore[reportCallIssue, reportArgumentType]
    return text[:160]
