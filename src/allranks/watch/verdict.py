"""What is said about a job that stands still or ended: who, what, where, since when, why, and what to do.

A verdict is a value: made by a cause (allranks.watch.causes) from evidence, printed by the agent, and kept in
RUN/diagnosis as JSON and Markdown. Its first line always holds the culprit beside the cause, never a victim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Confidence = Literal["certain", "likely", "possible"]

_LABEL_WIDTH = 8
_RED, _CYAN, _DIM, _OFF = "\x1b[1;31m", "\x1b[36m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of code."""

    file: str
    line: int
    function: str = ""
    code: str = ""
    """The text of the line, if the source can be read."""

    def short(self) -> str:
        """'train.py:27'."""
        return f"{self.file}:{self.line}"

    def text(self) -> str:
        """'train.py:27 in main:  loss.backward()'."""
        where = f"{self.file}:{self.line}"
        if self.function and self.function != "<module>":
            where += f" in {self.function}"
        return f"{where}:  {self.code}" if self.code else where


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another cause the evidence does not exclude."""

    code: str
    what: str
    decides: str
    """What would tell it from the verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cause, found in the evidence of one moment."""

    code: str
    name: str
    """kebab-case name of the cause."""
    what: str
    """The first line without the code: culprit and cause."""
    ranks: tuple[int, ...]
    """The culprits; empty where a node or the network is one."""
    hosts: tuple[str, ...] = ()
    where: tuple[str, ...] = ()
    """Finished lines, 'train.py:27 in main:  loss.backward()', the guilty one first."""
    since_s: float | None = None
    step: int | None = None
    others: str = ""
    facts: tuple[str, ...] = ()
    fix: str = ""
    confidence: Confidence = "certain"
    alternatives: tuple[Alternative, ...] = ()
    can_go_on: bool = True
    """False: a rank ended, or collectives that can never meet; waiting longer cannot help."""
    quoted: tuple[str, ...] = ()
    """Lines of a rank's output that belong to it: its traceback."""
    seen_by: str = ""
    """Set where the verdict is one node's own view (it is cut off from the others)."""

    def same_as(self, other: Verdict) -> bool:
        """Whether both say the same about the same culprits; used to print a verdict once."""
        return (self.code, self.ranks, self.hosts) == (other.code, other.ranks, other.hosts)

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) in the order they are shown; the label of a continued line is empty."""
        rows: list[tuple[str, str]] = []
        _add(rows, "where", self.where)
        step = f"step {self.step}" if self.step is not None else ""
        if self.since_s is not None:
            _add(rows, "since", (seconds(self.since_s) + (f", {step}" if step else ""),))
        elif step:
            _add(rows, "when", (step,))
        _add(rows, "others", (self.others,) if self.others else ())
        _add(rows, "why", self.facts)
        _add(rows, "do", tuple(self.fix.split("\n")) if self.fix else ())
        if self.alternatives:
            likely = tuple(f"{a.code} {a.what}; {a.decides}" for a in self.alternatives)
            _add(rows, "or", likely)
        if self.seen_by:
            _add(rows, "seen", (self.seen_by,))
        _add(rows, "more", (f"allranks explain {self.code}",))
        return rows

    def head(self) -> str:
        """The first line."""
        hedge = {"certain": "", "likely": "likely: ", "possible": "possibly: "}[self.confidence]
        return f"{self.code} {hedge}{self.what}"

    def text(self, *, color: bool = False) -> str:
        """The verdict as people read it, several lines."""
        red, cyan, dim, off = (_RED, _CYAN, _DIM, _OFF) if color else ("", "", "", "")
        out = [f"{red}{self.head()}{off}"]
        out += [f"  | {line}" for line in self.quoted]
        for label, text in self.lines():
            shade = cyan if label == "where" else ""
            mark = f"{label}:" if label else ""
            out.append(f"  {dim}{mark:<{_LABEL_WIDTH}}{off}{shade}{text}{off if shade else ''}")
        return "\n".join(out)

    def markdown(self) -> str:
        """The verdict as a page for RUN/diagnosis."""
        out = [f"# {self.code} {self.name}", "", f"**{self.head()}**", ""]
        if self.quoted:
            out += ["```", *self.quoted, "```", ""]
        for label, text in self.lines():
            out.append(
                f"- {label}: `{text}`" if label in ("where", "more") else f"- {label or 'also'}: {text}"
            )
        return "\n".join(out) + "\n"

    def to_json(self) -> dict[str, Any]:
        """Plain values for json.dumps; `from_json` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Verdict:
        """The verdict that `to_json` gave; unknown keys (a newer version's) are left out."""
        names = {f.name for f in dataclasses.fields(cls)}
        kept: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in names
        }
        kept["alternatives"] = tuple(Alternative(**a) for a in kept.get("alternatives", ()))
        return cls(**kept)


def _add(rows: list[tuple[str, str]], label: str, texts: tuple[str, ...]) -> None:
    for i, text in enumerate(texts):
        rows.append((label if i == 0 else "", text))


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """'rank 1', 'ranks 1 and 3', 'ranks 0-6', 'ranks 0-3, 5 and 7'."""
    ordered = sorted(set(ranks))
    if not ordered:
        return "no rank"
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts: list[str] = []
    for first, last in runs:
        parts += (
            [str(first)]
            if first == last
            else [f"{first}-{last}"]
            if last > first + 1
            else [str(first), str(last)]
        )
    return "ranks " + (parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}")


def many(ranks: tuple[int, ...] | list[int], one: str, more: str) -> str:
    """The verb that fits the number of ranks: many((1,), 'waits', 'wait')."""
    return one if len(set(ranks)) == 1 else more


def seconds(value: float) -> str:
    """'0.4 s', '3.1 s', '45 s', '12 min', '2.5 h'."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"
