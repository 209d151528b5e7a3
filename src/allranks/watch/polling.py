"""How are the ranks of this node looked at ten times a second, at little cost?

While all of them move, nothing but that is looked at, a few words of each page (`Poll.is_quiet`): the ranks have all cores, and whatever
the agent does takes one from them. Pages are read whole where something comes to stand still, and else twice a second.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from allranks.core.job import Job
from allranks.record import page
from allranks.record.notes import size_of_notes
from allranks.watch import proc, spawned
from allranks.watch.evidence import Rank
from allranks.watch.reading import record_of
from allranks.watch.rows import Row, row_of
from allranks.watch.timeline import Timeline

QUIET_S = 0.45
"""While all ranks move, they are looked at so often."""
STILL_S = 0.15
"""A rank that has made a mark within moves; nothing is judged of one that has stood for less (trigger.py)."""
WHOLE_S = 0.4
"""Where ranks stand, their whole pages are read at least so often."""
NO_TIMED = 1 << 62
DISCOVER_S = 1.0
STANDS_S = 1.0
_AT_WORK = ("R", "S", "D")


@dataclass
class _Seen:
    reader: page.PageReader | None = None
    marks: int = -1
    beat: bytes = b""
    moved_at: float = -math.inf
    read_at: float = -math.inf
    row: Row | None = None
    """As it was read from the whole page."""
    key: tuple[object, ...] = ()
    """What the glance at that moment showed."""


class Poll:
    """The newest rows of this node's ranks."""

    def __init__(self, job: Job) -> None:
        self.newest: dict[int, Row] = {}
        self._job = job
        self._ranks = {p.rank: Rank(p.rank, job.host, job.node_rank, p.local_rank, p.pid) for p in job.ranks}
        self._seen: dict[
            int, _Seen
        ] = {}  # by pid: a spawned rank takes the number of the process that started it
        self._ended: dict[int, bool] = {}
        self._discovered_at, self._looked_at = 0.0, -math.inf
        self.world_size = job.world_size
        self._timeline = Timeline(job)

    def ranks(self) -> tuple[Rank, ...]:
        """Who they are: rank, pid, host, node."""
        return tuple(self._ranks[n] for n in sorted(self._ranks))

    def is_quiet(self) -> bool:
        """Whether the rows would say nothing new: every rank moves, and all of them were looked at a moment ago."""
        self._timeline.peek()
        now, is_quiet = time.monotonic(), not self._ended
        for rank in self._ranks.values():  # all of them: each is seen to move or not
            is_quiet = self._moves(rank, now) and is_quiet
        return is_quiet and now - self._looked_at < QUIET_S

    def rows(self) -> dict[int, Row]:
        """Look at all of them."""
        self._looked_at = now = time.monotonic()
        if now - self._discovered_at > DISCOVER_S:
            self._discovered_at = now
            self.discover()
            for pid, seen in self._seen.items():
                if seen.reader is not None and seen.reader.follow():
                    self._seen[pid] = _Seen(seen.reader)
        for number, rank in self._ranks.items():
            self.newest[number] = _with_sleep(self._row(number, rank, now), rank.pid)
        self._timeline.look(self._ranks.values())
        return self.newest

    def forget_times(self) -> None:
        """Read every page whole the next time."""
        self._looked_at = -math.inf
        for seen in self._seen.values():
            seen.read_at = -math.inf

    def ended(self, rank: int, *, is_well: bool) -> None:
        """The agent has seen this rank end."""
        self._ended[rank] = is_well
        self.forget_times()
        self._timeline.ended(rank)

    def close(self) -> None:
        """Close the pages."""
        for seen in self._seen.values():
            if seen.reader is not None:
                seen.reader.close()
        self._seen.clear()
        self._timeline.close()

    def _moves(self, rank: Rank, now: float) -> bool:
        seen = self._seen.get(rank.pid)
        if seen is None or seen.reader is None:
            return False
        try:
            beat, is_alive = seen.reader.beat()
        except OSError:
            return False
        if beat != seen.beat:
            seen.beat, seen.moved_at = beat, now
            return is_alive
        return is_alive and now - seen.moved_at < STILL_S and proc.state(rank.pid) in _AT_WORK

    def _row(self, number: int, rank: Rank, now: float) -> Row:
        letter = proc.state(rank.pid) if number not in self._ended else ""
        seen = self._seen.setdefault(rank.pid, _Seen())
        over = number in self._ended
        well = self._ended.get(number, False)
        if seen.reader is None:
            seen.reader = self._open(rank.pid)
        if seen.reader is None:
            return Row(number, letter, is_over=over, has_ended_well=well)
        before = self.newest.get(number)
        try:
            glance = seen.reader.glance()
            stands = glance.marks == seen.marks
            if before is not None and now - seen.read_at < WHOLE_S:
                seen.marks = glance.marks
                if not stands:
                    return _of_glance(before, glance, letter)
                if seen.row is not None and seen.key == _key(glance):
                    return _of_same(seen.row, glance, letter, now - seen.read_at)
            found = seen.reader.read(timed_after=NO_TIMED)
        except (OSError, page.NotARecord, ValueError):
            return before or Row(number, letter, is_over=over, has_ended_well=well)
        seen.marks, seen.read_at, seen.key = glance.marks, now, _key(glance)
        row = row_of(number, letter, record_of(found), glance.marks, is_over=over, ended_well=well)
        seen.row = replace(row, notes=size_of_notes(found.path), exchanged=_exchanged(found))
        return seen.row

    def _open(self, pid: int) -> page.PageReader | None:
        if self._job.record_dir is None:
            return None
        try:
            return page.PageReader(self._job.record_dir / f"{pid}.page")
        except OSError:
            return None

    def discover(self) -> None:
        """Ranks that a script started itself (mp.spawn): their pages say who they are."""
        world_size, ranks = spawned.find(self._job)
        if ranks:
            self._ranks, self.world_size = ranks, world_size


def _with_sleep(row: Row, pid: int) -> Row:
    """The row, with whether the rank sleeps; not looked at before it has stood for a second."""
    is_asleep = row.state == "S" and row.phase_s > STANDS_S and "nanosleep" in proc.wchan(pid)
    return replace(row, is_asleep=is_asleep) if is_asleep != row.is_asleep else row


def _exchanged(found: page.Record) -> tuple[float, ...]:
    times = found.times
    if times is None or not times.exchanged_of_ns:
        return ()
    backward_ns = times.phase_ns[page.Phase.BACKWARD]
    spent = (backward_ns, times.buffers_ns, times.exchanged_ns, times.exchanged_of_ns)
    return tuple(round(ns / 1e9, 4) for ns in spent)


def _of_glance(before: Row, glance: page.Glance, letter: str) -> Row:
    """The row before, with what a glance shows: the rank moves."""
    now = time.monotonic_ns()
    return replace(
        before,
        state=letter,
        phase=glance.phase.name.lower(),
        phase_s=_age_s(now, glance.phase_since_ns, 3),
        tick_s=_age_s(now, glance.tick_ns, 2) if glance.tick_ns else 0.0,
        step=glance.step,
        seq=glance.group_seq,
        marks=glance.marks,
        op="",
        call_s=0.0,
        is_over=before.is_over or glance.exit_kind != page.ExitKind.NOT_ENDED,
    )


def _of_same(read: Row, glance: page.Glance, letter: str, later_s: float) -> Row:
    """The row read a moment ago: the rank has made no mark since, it has only stood longer."""
    now = time.monotonic_ns()
    return replace(
        read,
        state=letter,
        phase_s=_age_s(now, glance.phase_since_ns, 3),
        tick_s=_age_s(now, glance.tick_ns, 2) if glance.tick_ns else 0.0,
        call_s=round(read.call_s + later_s, 3) if read.op else 0.0,
    )


def _key(glance: page.Glance) -> tuple[object, ...]:
    return glance.marks, glance.issued, glance.group_seq, glance.step, glance.exit_kind


def _age_s(now_ns: int, since_ns: int, digits: int) -> float:
    return round(max(0.0, (now_ns - since_ns) / 1e9), digits)
