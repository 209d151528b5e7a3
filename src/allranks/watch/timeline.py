"""What does an agent write of the time of its ranks? RUN/timeline/node<k>.jsonl; docs/design/timeline.md has the format.

Everything is read from outside: the ranks' pages, /proc. A sample a second at first, later ever less often, so that a job of a week
leaves about 5 MB a rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks.core.cores import usable_cores
from allranks.core.job import Job
from allranks.perf import mean_of_means, own_values
from allranks.perf.history import FOLDER, FORMAT, row_of_call, row_of_sample, row_of_step
from allranks.perf.values import PHASES, CallTimes, Sample, StepTimes
from allranks.record import layout as at
from allranks.record import page
from allranks.record.notes import read_notes, size_of_notes
from allranks.watch import proc
from allranks.watch.evidence import Rank
from allranks.watch.host_use import HostUse
from allranks.watch.passes_seen import PassesSeen
from allranks.watch.workers import Workers

FIRST_EVERY_S = 0.5
FIRST_S = 20.0
EVERY_S = 1.0
EARLY_S = 0.05
"""Looks come at tenths of a second, and twice a second while all ranks move: one that is a moment early does not wait for the next."""
LONGER_BY = 800
"""After this many seconds the interval grows: it is the age of the attempt divided by this."""
STEPS_A_SAMPLE, CALLS_A_SAMPLE = 4, 2
FACTS_EVERY_S = 5.0


@dataclass
class _Seen:
    rank: Rank
    reader: page.PageReader | None = None
    step: int = 0  # the newest timed step that was written or passed over
    call: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    facts_at: float = -FACTS_EVERY_S
    workers: Workers = field(default_factory=Workers)
    passes: PassesSeen = field(default_factory=PassesSeen)
    used: tuple[float, float, float, int] = (
        0.0,
        0.0,
        0.0,
        0,
    )  # as _used_by, of the last look at which it lived
    used_ns: int = 0
    drawn: int = 0
    loader: tuple[int, int] = (0, 0)  # pass, drawn in it
    is_over: bool = False


class Timeline:
    """The timeline of one attempt on this node. A full disk ends it; the job does not notice."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._began_ns, self._next = time.monotonic_ns(), 0.0
        self._seen: dict[int, _Seen] = {}
        self._file: Any = None
        self._logs = {r.rank: r.log for r in job.ranks}
        self._host = HostUse(len(job.ranks) < job.world_size)
        path = job.run_dir / FOLDER / f"node{job.node_rank}.jsonl"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            attempt = _attempts_in(path)
            self._file = path.open("a", encoding="utf-8", buffering=1 << 16)
            self._write(self._head(attempt))

    def look(self, ranks: Iterable[Rank]) -> None:
        """Write a sample if it is time for one."""
        age = self._age()
        if self._file is None or age < self._next - EARLY_S:
            return
        self._next = age + (FIRST_EVERY_S if age < FIRST_S else max(EVERY_S, age / LONGER_BY))
        for rank in ranks:
            known = self._seen.get(rank.rank)
            if known is None or known.rank.pid != rank.pid:
                self._seen[rank.rank] = _Seen(rank)
        self._sample([s for s in self._seen.values() if not s.is_over], STEPS_A_SAMPLE)

    def peek(self) -> None:
        """Ten times a second: what a sample now and then would miss."""
        self._host.peek()

    def ended(self, rank: int) -> None:
        """A rank has ended: what its page still has."""
        seen = self._seen.get(rank)
        if seen is not None and not seen.is_over and self._file is not None:
            seen.step, seen.facts_at = 0, -FACTS_EVERY_S
            self._sample([seen], 1 << 30, with_host=False)  # of one rank alone, while others live
            seen.is_over = True
            if seen.reader is not None:
                seen.reader.close()
                seen.reader = None

    def close(self) -> None:
        """Write what is buffered, and close the pages and the file."""
        for seen in self._seen.values():
            if seen.reader is not None:
                seen.reader.close()
        self._seen.clear()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    # --- what is written ---

    def _head(self, attempt: int) -> dict[str, Any]:
        job = self._job
        return {
            "kind": "head",
            "format": FORMAT,
            "node": job.node_rank,
            "host": job.host,
            "attempt": attempt,
            "world_size": job.world_size,
            "unix_s": round(time.time() - self._age(), 3),
            "ranks": [{"rank": r.rank, "pid": r.pid, "local_rank": r.local_rank} for r in job.ranks],
            "facts": {"cores": usable_cores(), "shm_bytes": proc.space("/dev/shm")[0] or 0},
        }

    def _sample(self, chosen: list[_Seen], most_steps: int, *, with_host: bool = True) -> None:
        rows, lines, workers = [], [], []
        for seen in chosen:
            record = self._read(seen)
            if record is None or record.times is None:
                continue
            workers += record.loader_worker_pids
            seen.passes.look(record)
            rows.append((record.times.at_ns, row_of_sample(seen.rank.rank, self._sample_of(seen, record))))
            lines += self._steps(seen, record, most_steps)
            lines += self._calls(seen, record)
            lines += self._facts(seen, record)
        throttled = round(throttled_s(), 3)
        for at_ns, row in rows:  # pages are of moments up to 0.4 s apart: each has its own
            t = round((at_ns - self._began_ns) / 1e9, 4)
            self._write({"kind": "sample", "t": t, "throttled_s": throttled, "rows": [row]})
        if rows and with_host:
            host = self._host.look({s.rank.rank: s.rank.pid for s in chosen}, workers)
            self._write({"kind": "host", "t": round(self._age(), 4), **host})
        for line in lines:
            self._write(line)
        with suppress(OSError):
            if self._file is not None:
                self._file.flush()

    def _sample_of(self, seen: _Seen, record: page.Record) -> Sample:
        assert record.times is not None
        times = record.times
        cpu_s, queue_s, rss, faults = _used_until(seen, record.pid, times.at_ns)
        busy_s, read = seen.workers.look(self._job.record_dir, record.loader_worker_pids)
        return Sample(
            t=0.0,
            step=times.step,
            phases={p: times.phase_ns[page.Phase[p.upper()]] / 1e9 for p in PHASES},
            buffers_s=times.buffers_ns / 1e9,
            exchanged_s=times.exchanged_ns / 1e9,
            exchanged_of_s=times.exchanged_of_ns / 1e9,
            epoch=record.epoch,
            loss=times.loss,
            cpu_s=cpu_s,
            queue_s=queue_s,
            rss_mb=rss,
            major_faults=faults,
            drawn=_drawn(seen, record),
            busy_s=busy_s,
            read=read,
            calls=record.issued,
            printed=_size(self._logs.get(seen.rank.rank)),
        )

    def _steps(self, seen: _Seen, record: page.Record, most: int) -> list[dict[str, Any]]:
        new = [t for t in record.timed if t.step > seen.step]
        if not new:
            return []
        seen.step = new[-1].step
        new.sort(key=lambda t: (at.preference(t.step), t.step), reverse=True)  # the ones that all ranks time
        chosen = sorted([*new[:most], *(t for t in new[most:] if t.step == 1)], key=lambda t: t.step)
        rows = [row_of_step(self._step_times(t)) for t in chosen]
        return [{"kind": "steps", "rank": seen.rank.rank, "rows": rows}]

    def _step_times(self, timed: page.TimedStep) -> StepTimes:
        def moment(ns: int) -> float | None:
            return (ns - self._began_ns) / 1e9 if ns else None

        def span(begin: int, end: int) -> tuple[float, float] | None:
            return ((begin - self._began_ns) / 1e9, (end - self._began_ns) / 1e9) if begin and end else None

        return StepTimes(
            step=timed.step,
            start=moment(timed.start_ns) or 0.0,
            end=moment(timed.end_ns) or 0.0,
            data=span(timed.data_from_ns, timed.data_to_ns),
            forward=span(timed.forward_from_ns, timed.forward_to_ns),
            buffers=span(timed.buffers_from_ns, timed.buffers_to_ns),
            backward=span(timed.backward_from_ns, timed.backward_to_ns),
            ready=moment(timed.ready_ns),
            optimizer=moment(timed.optimizer_from_ns),
        )

    def _calls(self, seen: _Seen, record: page.Record) -> list[dict[str, Any]]:
        new = [c for c in record.collectives if c.number > seen.call and c.exited_ns and c.seq >= 0]
        if not new:
            return []
        seen.call = record.collectives[-1].number
        new.sort(key=lambda c: (at.preference(c.seq + 1), c.seq), reverse=True)
        rows = [
            row_of_call(self._call_times(c)) for c in sorted(new[:CALLS_A_SAMPLE], key=lambda c: c.number)
        ]
        return [{"kind": "calls", "rank": seen.rank.rank, "rows": rows}]

    def _call_times(self, call: page.Collective) -> CallTimes:
        entered, exited = ((ns - self._began_ns) / 1e9 for ns in (call.entered_ns, call.exited_ns))
        line, size = call.line.rpartition("/")[2], call.numel * _BYTES.get(call.dtype, 4)
        return CallTimes(call.op, call.group, call.seq, call.step, entered, exited, line, size, call.is_async)

    def _facts(self, seen: _Seen, record: page.Record) -> list[dict[str, Any]]:
        """What is new of what seldom changes."""
        if self._age() - seen.facts_at < FACTS_EVERY_S:
            return []
        seen.facts_at = self._age()
        found = facts_of(record, seen.facts.get("notes_bytes", -1), seen.passes)
        new = {k: v for k, v in found.items() if seen.facts.get(k) != v}
        seen.facts |= found
        new.pop("notes_bytes", None)
        return [{"kind": "facts", "rank": seen.rank.rank, "facts": new}] if new else []

    # --- how ---

    def _read(self, seen: _Seen) -> page.Record | None:
        folder = self._job.record_dir
        try:
            if seen.reader is None and folder is not None:
                seen.reader = page.PageReader(folder / f"{seen.rank.pid}.page")
            elif seen.reader is not None and seen.reader.follow():
                seen.step = 0
            return seen.reader.read(timed_after=seen.step) if seen.reader is not None else None
        except (OSError, page.NotARecord, ValueError):
            return None

    def _age(self) -> float:
        return (time.monotonic_ns() - self._began_ns) / 1e9

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError:  # a full disk
            self._file = None


_BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "uint8": 1, "int8": 1, "bool": 1}


def facts_of(record: page.Record, notes_bytes: int, passes: PassesSeen) -> dict[str, Any]:
    """What is known of a rank beside its times: from its environment, its loader, and what it noted itself."""
    pid, found = record.pid, {}
    with suppress(OSError, AttributeError):
        cpus = os.sched_getaffinity(pid)
        found["affinity"] = len(cpus)
        if len(cpus) <= 4:
            found["cpus"] = sorted(cpus)
    if (threads := proc.environment(pid, "OMP_NUM_THREADS")).isdigit():
        found["omp_threads"] = int(threads)
    size = size_of_notes(record.path)
    if size != notes_bytes:
        found["notes_bytes"] = size
        noted = read_notes(record.path)
        found |= own_values.facts_of(noted) | mean_of_means.facts_of(noted)
        for note in noted:
            if note["kind"] == "replica":
                found["replica"] = {k: v for k, v in note.items() if k != "kind"}
            elif note["kind"] == "pass" and note.get("training"):
                passes.trains(note)
                found |= _of_pass(note, found)
    return found | passes.facts()


def _of_pass(note: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Of a pass over a training loader: the first tells of the loader, the later ones how long they had to wait for their first batch."""
    if note.get("number") == 1:
        return {"loader_batch": note.get("batch_size", -1), "loader_persistent": bool(note.get("persistent"))}
    first_s = float(note.get("first_s", 0.0))  # the shorter of two: what they have in common
    return {"loader_first_s": min(first_s, known.get("loader_first_s", first_s))}


def throttled_s() -> float:
    """How long our cgroup has been kept from running since it had used up its share; 0 if nothing says so."""
    for line in proc.read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "cpu", "cpu,cpuacct"):
            continue
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu"):
            for folder in (root + path.rstrip("/"), root):
                for text in proc.read(f"{folder}/cpu.stat").splitlines():
                    name, _, value = text.partition(" ")
                    if name == "throttled_usec":
                        return int(value) / 1e6
                    if name == "throttled_time":
                        return int(value) / 1e9
    return 0.0


def _used_until(seen: _Seen, pid: int, at_ns: int) -> tuple[float, float, float, int]:
    """As `_used_by`, of that moment: what goes with the times of a page, which are up to 0.4 s older."""
    found, now = _used_by(pid), time.monotonic_ns()
    if found is None:
        return seen.used
    (cpu_s, queue_s, *_), since = seen.used, seen.used_ns
    seen.used, seen.used_ns = found, now
    share = min(1.0, max(0.0, (at_ns - since) / max(1, now - since)))
    return cpu_s + share * (found[0] - cpu_s), queue_s + share * (found[1] - queue_s), *found[2:]


def _used_by(pid: int) -> tuple[float, float, float, int] | None:
    """Processor time, the main thread's wait for a core, megabytes in memory, pages that had to come back from the disk."""
    used = proc.times(pid)
    pages = proc.read(f"/proc/{pid}/statm").split()
    text = proc.read(f"/proc/{pid}/stat")
    fields = text[text.rfind(")") + 2 :].split()
    if used is None or len(pages) < 2 or len(fields) < 10 or fields[0] in "ZX":
        return None
    rss = int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return used.process_s, used.main_waited_s, round(rss, 1), int(fields[9])


def _drawn(seen: _Seen, record: page.Record) -> int:
    """Batches over all passes; of those between two looks only the newest pass counts."""
    if record.loader is None:
        return seen.drawn
    number, drawn = record.loader.number, record.loader.drawn
    before = seen.loader[1] if number == seen.loader[0] else 0
    seen.drawn += max(0, drawn - before)
    seen.loader = number, drawn
    return seen.drawn


def _size(path: Path | None) -> int:
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0


def _attempts_in(path: Path) -> int:
    """How many attempts are in the file already: a run that is resumed in its directory adds to them."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return sum(line.startswith('{"kind":"head"') for line in file)
    except OSError:
        return 0
