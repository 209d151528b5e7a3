"""What happens with a verdict: who prints it, what the job does about it, and what is kept in the run directory?"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from allranks.core.job import OnHang
from allranks.watch.evidence import Evidence
from allranks.watch.verdict import Verdict, seconds

Action = Literal["report", "stop", "restart"]

AGAIN_S = (60.0, 600.0, 1800.0)
"""A hang that goes on is reported again after so long."""
SETTLES_S = 0.5
"""After the first report of a hang."""
SECOND_LOOK_S = 2.0
"""A verdict by which the job cannot go on is said at once, and acted on if no rank has moved after so long."""
AT_WORK_S = 30.0
"""Work that must end first is waited for so long: a rank that waits for a GPU spins, and looks as if it worked."""
PATIENCE_S = 60.0
"""--on-hang stop or restart without --after: how long a hang that might end by itself is left alone."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict on its way to the agent: what to show, and what to do."""

    verdict: Verdict
    action: Action = "report"
    note: str = ""
    """A last line: what the launcher does about it."""
    is_on_screen: bool = False
    """Its text was shown a moment ago: only the last line is news."""
    identity: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def code(self) -> str:
        """The cause."""
        return self.verdict.code

    def text(self, *, color: bool = False) -> str:
        """What people read."""
        text = self.verdict.text(color=color)
        return f"{text}\n  {self.note}" if self.note else text

    def shown(self, *, color: bool = False) -> str:
        """What is printed: the text, or only the last line where the text still stands above it."""
        return f"allranks: {self.code}: {self.note}" if self.is_on_screen else self.text(color=color)

    def to_json(self) -> dict[str, Any]:
        """Everything; also what the other nodes get."""
        return {
            "version": VERSION,
            "id": self.identity,
            "action": self.action,
            "text": self.text(),
            "note": self.note,
            **self.verdict.to_json(),
        }


def action_at_once(verdict: Verdict, on_hang: OnHang) -> Action:
    """What to do when a verdict is made: end the job only if it surely cannot go on."""
    if verdict.can_go_on or verdict.confidence != "certain":
        return "report"
    return "restart" if on_hang == "restart" else "stop"


def action_later(verdict: Verdict, on_hang: OnHang, after_s: float | None, hung_s: float) -> Action:
    """What to do about a hang that has gone on for so long."""
    if on_hang == "report" or hung_s < (PATIENCE_S if after_s is None else after_s):
        return "report"
    return on_hang


@dataclass
class Standing:
    """A hang that has been reported and goes on."""

    verdict: Verdict
    watched: tuple[int, ...]
    """The ranks that must not have moved for it to go on: the culprits; all, where the job is to be ended."""
    episode: tuple[object, ...]
    since: float
    """Monotonic time of the first report."""
    reports: int = 1
    has_acted: bool = False
    ends_as: Action = "report"
    """What to do after a second look: the job surely cannot go on, if what was seen is so."""

    def __post_init__(self) -> None:
        self._settles_until = self.since + SETTLES_S

    def stands(self, where: tuple[object, ...], now: float) -> bool:
        """Whether the ranks stand where they stood.

        Just after the report their place may change once more, though they stand: a light step's marks are ended 0.1 to 0.2 s after it
        began, and a rank that has been asked falls asleep again. Then they stand since that moment.
        """
        if where != self.episode and now < self._settles_until:
            self.episode, self.since = where, now
        return where == self.episode

    def due(
        self, now: float, on_hang: OnHang, after_s: float | None, *, is_at_work: bool = False
    ) -> Said | None:
        """What to say (again) now, if anything; while a rank is at work that must end before it can wait, none is ended for a while."""
        hung = now - self.since
        since = self.verdict.since_s
        verdict = replace(self.verdict, since_s=since + hung) if since is not None else self.verdict
        least = AT_WORK_S if is_at_work else SECOND_LOOK_S
        if self.ends_as != "report" and hung >= least and not self.has_acted:
            self.has_acted = True
            what = "ended" if self.ends_as == "stop" else "started again"
            note = f"nothing has moved for {seconds(hung)}: the job is {what}"
            return Said(verdict, self.ends_as, note, is_on_screen=hung < SECOND_LOOK_S + 3.0)
        action = action_later(self.verdict, on_hang, after_s, hung)
        if action != "report" and not self.has_acted:
            self.has_acted = True
            what = "the job is ended" if action == "stop" else "the job is started again"
            return Said(
                verdict, action, f"it has not moved for {seconds(hung)}: {what} (--on-hang {on_hang})"
            )
        if self.reports <= len(AGAIN_S) and hung >= AGAIN_S[self.reports - 1]:
            self.reports += 1
            return Said(verdict, "report", f"still so after {seconds(hung)}")
        return None


def keep(folder: Path, said: dict[str, Any], evidence: Evidence | None) -> None:
    """Write a verdict to RUN/diagnosis as NNN-ARnnn.json and .md; once, also where nodes share the directory.

    Raises:
        OSError: The directory cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(
        said["id"] in p.read_text(encoding="utf-8", errors="replace")
        for p in folder.glob(f"*-{said['code']}.json")
    ):
        return
    taken = [int(p.name[:3]) for p in folder.glob("[0-9][0-9][0-9]-*.json") if p.name[:3].isdigit()]
    stem = folder / f"{max(taken, default=0) + 1:03d}-{said['code']}"
    whole = {**said, "evidence": evidence.to_json() if evidence else None}
    stem.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    verdict = Verdict.from_json(said)
    text = verdict.markdown() + (f"\n{said['note']}\n" if said.get("note") else "")
    if evidence is not None:
        text += "\n" + stacks_markdown(evidence)
    stem.with_suffix(".md").write_text(text, encoding="utf-8")


def stacks_markdown(evidence: Evidence) -> str:
    """The stacks of all ranks, for the page."""
    out = ["## Stacks", ""]
    for rank in evidence.ranks:
        out.append(f"### rank {rank.rank} on {rank.host} (process {rank.pid}, state {rank.state or 'gone'})")
        if not (rank.stacks or rank.crash or rank.workers):
            out.append("Not asked for: the record was enough, or the process is gone.")
            continue
        out.append("```")
        for stack in rank.stacks or rank.crash:
            out.append(f"thread {stack.thread}{' (main)' if stack.is_main else ''}")
            out += [f"  {f.file}:{f.line} in {f.function}  {f.code}".rstrip() for f in stack.frames[:40]]
        for worker in rank.workers:
            out.append(
                f"child {worker.pid} {f'(loader worker {worker.index}, index {worker.item})' if worker.is_loader else worker.command}"
            )
            out += [
                f"  {f.file}:{f.line} in {f.function}  {f.code}".rstrip()
                for s in worker.stacks
                if s.is_main
                for f in s.frames[:20]
            ]
        out.append("```")
    return "\n".join(out) + "\n"
