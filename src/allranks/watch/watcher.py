"""How does the agent's watcher work? It looks at the ranks ten times a second (polling.py), takes evidence on suspicion, and speaks.

    rows (every node) -> trigger (hub) -> capture (every node) -> evidence -> decide -> verdict (hub, one for all)

It fits allranks.run.watch_seam.Watch; all calls come from one thread of the agent's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from allranks.core.job import Job, NodeInfo, RankExit
from allranks.watch import bundle, gather, peeking, proc, remains, sampling, spawned
from allranks.watch.case import Case, is_dying
from allranks.watch.decide import decide, decide_all
from allranks.watch.evidence import Evidence, Node, Rank, from_json, to_json
from allranks.watch.polling import Poll
from allranks.watch.rows import Row
from allranks.watch.saying import Said, Standing, action_at_once, keep
from allranks.watch.slowness import Slowness
from allranks.watch.stood import Stood
from allranks.watch.trigger import Suspicion, Trigger
from allranks.watch.verdict import Place, Verdict

ANSWER_S = 0.9
"""How long the hub waits for the other nodes' evidence."""
QUIET_KINDS = ("numbers", "notes")
"""What is looked at without touching a rank: the job goes on, and nothing stands still."""
ON_SCREEN_S = 30.0
"""So long a verdict shown is not shown in full again, when the job ends of what it said."""
QUIET_S = 600.0
"""The same verdict on the same ranks is not said twice within."""


class Watcher:
    """The watcher of one node; on the hub it decides for all."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._talk: Any = None
        self._asked_times = 0

    # --- the seam ---

    def start(self, job: Job, talk: Any) -> None:
        """An attempt begins."""
        self.close()  # the pages of the one before
        self._job, self._talk = job, talk
        self._began = time.monotonic()
        self._poll = Poll(job)
        self._trigger, self._slowness = Trigger(), Slowness()
        self._exits: dict[int, RankExit] = {}
        self._remains = remains.Remains()
        self._oom_before = proc.oom_kills()
        self._asked: tuple[Suspicion, float] | None = None
        self._bundles: dict[int, dict[str, Any]] = {}
        self._said: dict[tuple[object, ...], float] = {}
        self._shown, self._is_over = ("", 0.0), False
        self._standing: Standing | None = None
        self._lost: set[int] = set()
        self._told_silent: set[str] = set()
        self._nodes: Mapping[int, NodeInfo] = {n.node_rank: n for n in job.nodes}
        self._stood, self._lines = Stood(), sampling.Lines()

    def is_quiet(self, nodes: Mapping[int, NodeInfo]) -> bool:
        """Whether `row` and `tick` would find nothing: all ranks of this node move, and nothing is under way."""
        if self._job is None or not self._poll.is_quiet() or self._trigger.is_waiting:
            return False
        return not (self._asked or self._standing or any(n.is_lost for n in nodes.values()))

    def row(self) -> dict[str, Any]:
        """This node's ranks, small."""
        if self._job is None:
            return {}
        ranks = [r.to_json() for r in self._poll.rows().values()]
        row: dict[str, Any] = {"restart": self._job.restart, "ranks": ranks}
        if not self._job.is_hub and (ended := self._remains.for_row()):
            row |= {"ended": ended, "node": to_json(self._own_node())}
        return row

    def tick(self, nodes: Mapping[int, NodeInfo]) -> Sequence[Said]:
        """Look, and say what there is to say."""
        job = self._job
        if job is None or self._is_over:
            return ()
        self._nodes = nodes or self._nodes
        if not job.is_hub:
            return self._look_at_hub(job)
        rows = self._rows()
        now = time.monotonic()
        lost = {n for n, info in self._nodes.items() if info.is_lost}
        if lost - self._lost:
            self._lost |= lost
            return self._conclude(self._evidence("lost", rows))
        if self._asked is not None:
            return self._when_answered(rows, now)
        found = self._trigger.look(rows, now)
        if found is not None:
            said = self._investigate(found, rows, now)
            if said or self._asked or found.kind not in QUIET_KINDS:
                return said
        if (again := self._again(now)) is not None:
            return (again,)
        return self._look_for_slow(rows, now)

    def ended(self, exit: RankExit) -> None:
        """A rank has ended, well or not."""
        if self._job is not None:
            self._exits[exit.rank] = exit
            self._poll.ended(exit.rank, is_well=not exit.failed)
            if not exit.by_us and not self._job.is_hub:
                self._remains.add(exit, self._job.record_dir)

    def on_exit(self, exits: Sequence[RankExit], nodes: Mapping[int, NodeInfo]) -> Said | None:
        """The verdict on an attempt that ended badly."""
        job = self._job
        if job is None or not exits:
            return None
        self._nodes = nodes or self._nodes
        for ended in exits:
            self._exits[ended.rank] = ended
        self._is_over = True
        self._bundles.clear()
        self._poll.discover()
        evidence = self._evidence("exit", self._rows(), fresh=True, sample_s=0.02)
        verdict = decide(evidence)
        if verdict is None:
            return None
        is_shown = (verdict.head(), True) == (self._shown[0], time.monotonic() - self._shown[1] < ON_SCREEN_S)
        said = Said(verdict, "stop", "the job has ended" if is_shown else "", is_on_screen=is_shown)
        self._write(said, evidence)
        return said

    def last_look(self) -> Sequence[Said] | None:
        """All ranks have ended well: what their records say before they go; None: other nodes are asked, a tick will tell."""
        job = self._job
        if job is None or not job.is_hub or self._is_over:
            return ()
        rows = self._rows_at_end()
        found = Suspicion(self._trigger.last(rows), tuple(sorted(rows)))
        return self._investigate(found, rows, time.monotonic()) or (None if self._asked else ())

    def capture(self, request: dict[str, Any]) -> dict[str, Any]:
        """Evidence of this node's ranks."""
        job = self._job
        if job is None:
            return {}
        if "sample" in request:
            seen = self._seen_at(rank := int(request["sample"]))
            return {"seen_at": [(phase, to_json(place), times) for phase, place, times in seen], "of": rank}
        if "notes" in request:
            ranks = gather.take_quietly(self._poll.ranks(), job.record_dir)
        else:
            sample_s = float(request.get("sample_s", gather.SAMPLE_S))
            ranks = self._take(with_sockets=bool(request.get("sockets")), sample_s=sample_s)
        own = {"ranks": [to_json(r) for r in ranks], "node": to_json(self._own_node())}
        return own | {"number": request.get("number")}

    def on_bundle(self, node_rank: int, bundle: dict[str, Any]) -> None:
        """Another node's evidence (or this one's)."""
        if "seen_at" in bundle:
            seen = [(phase, from_json(Place, place), times) for phase, place, times in bundle["seen_at"]]
            self._lines.found(bundle["of"], seen)
        elif (
            bundle.get("number") == self._asked_times
        ):  # else late: of another moment than the others' answers
            self._bundles[node_rank] = bundle

    def on_verdict(self, verdict: dict[str, Any]) -> None:
        """The hub's verdict, on another node: keep it here, too."""
        if self._job is not None:
            keep(self._job.run_dir / "diagnosis", verdict, None)

    def close(self) -> None:
        """Nothing stays open."""
        if self._job is not None:
            self._poll.close()
        self._job = None

    # --- looking ---

    def _rows(self) -> dict[int, Row]:
        """The newest rows of all ranks of all nodes."""
        assert self._job is not None
        rows = dict(self._poll.newest)
        for number, info in self._nodes.items():
            if number != self._job.node_rank and not info.is_lost:
                rows |= {r.rank: r for r in map(Row.from_json, info.row.get("ranks", ()))}
        return rows

    def _rows_at_end(self) -> dict[int, Row]:
        """The last rows: read once more, whatever was read a moment ago."""
        self._poll.forget_times()
        self._poll.rows()
        return self._rows()

    def _investigate(self, found: Suspicion, rows: Mapping[int, Row], now: float) -> Sequence[Said]:
        """Take evidence here, or ask every node for it."""
        assert self._job is not None
        if len(self._nodes) > 1:
            self._bundles.clear()
            self._asked = (found, now)
            self._asked_times += 1
            kind = "notes" if found.kind in QUIET_KINDS else "sockets"
            self._talk.ask({kind: True, "number": self._asked_times}, None)
            return ()
        sample_s = 0.02 if found.kind in ("stopped", "dying", "mismatch") else gather.SAMPLE_S
        evidence = self._evidence(found.kind, rows, fresh=True, sample_s=sample_s)
        return self._conclude(evidence)

    def _when_answered(self, rows: Mapping[int, Row], now: float) -> Sequence[Said]:
        """Decide when all nodes that are there have answered, or the time is up."""
        assert self._asked is not None
        found, asked_at = self._asked
        missing = [n for n, info in self._nodes.items() if not info.is_lost and n not in self._bundles]
        if missing and now - asked_at < ANSWER_S:
            return ()
        self._asked = None
        return self._conclude(self._evidence(found.kind, rows))

    def _look_at_hub(self, job: Job) -> Sequence[Said]:
        """Not the hub: speak only when the hub is gone, of what is seen here."""
        lost = {n for n, info in self._nodes.items() if info.is_lost}
        if not lost - self._lost:
            return ()
        self._lost |= lost
        evidence = self._evidence("lost", self._rows(), fresh=True)
        return self._conclude(replace(evidence, here=job.node_rank, hub=min(lost)))

    def _look_for_slow(self, rows: Mapping[int, Row], now: float) -> Sequence[Said]:
        slow, suspect = self._slowness.look(rows, now), self._slowness.suspect()
        if suspect is None or ("AR800", (suspect,)) in self._said:
            return ()
        if self._lines.is_due(suspect, now):
            if suspect in self._poll.newest:
                self._lines.found(suspect, self._seen_at(suspect))
            else:
                self._talk.ask({"sample": suspect}, [n for n, i in self._nodes.items() if suspect in i.ranks])
        if slow is None or not self._lines.is_enough(slow, now):
            return ()
        slow = self._lines.with_places(slow)
        return self._conclude(replace(self._evidence("slow", rows, fresh=True), slow=slow))

    def _again(self, now: float) -> Said | None:
        """A hang that goes on: report again, or act on it."""
        assert self._job is not None
        standing = self._standing
        if standing is None:
            return None
        if not standing.stands(self._where_they_are(standing.watched), now):
            self._talk.event(
                {"event": "moved-on", "code": standing.verdict.code, "ranks": list(standing.verdict.ranks)}
            )
            self._standing = None
            return None
        rows = self._rows()
        is_at_work = any(
            rows[n].phase == "build" and rows[n].state == "R" for n in standing.watched if n in rows
        )
        said = standing.due(now, self._job.on_hang, self._job.after_s, is_at_work=is_at_work)
        if said is not None:
            self._is_over = said.action != "report"
            self._write(said, None)
        return said

    # --- deciding and saying ---

    def _conclude(self, evidence: Evidence) -> Sequence[Said]:
        assert self._job is not None
        if evidence.trigger in QUIET_KINDS:
            return self._say_silent(evidence)
        verdict = decide(evidence)
        now = time.monotonic()
        case = Case(evidence)
        if case.is_end_to_come:
            return ()  # they lost a peer, whose end is to be heard of first
        if evidence.trigger != "lost" and any(e.failed and not e.by_us for e in self._exits.values()):
            return ()  # what that rank left is on its way, maybe from another node: the exit itself is told in a moment
        self._bundles.clear()  # answers grow old
        if verdict is None or self._is_told(verdict) or not self._is_news(verdict, now):
            return ()
        evidence, verdict = peeking.with_values(evidence, verdict, self._job.node_rank)
        action = action_at_once(verdict, self._job.on_hang)
        # While every rank lives, a look at one moment may be wrong (a starved rank just about to go on): the verdict is said now,
        # and the job ended only after a second look at which nothing has moved.
        all_live = not self._exits and evidence.trigger not in ("dying", "lost")
        said = Said(verdict, "report" if all_live else action)
        if said.action == "report":
            watched = tuple(self._rows()) if action != "report" else verdict.ranks
            self._standing = Standing(verdict, watched, self._where_they_are(watched), now, ends_as=action)
        else:
            self._is_over = True
        self._write(said, evidence)
        return (said,)

    def _say_silent(self, evidence: Evidence) -> Sequence[Said]:
        """What is wrong while the job goes on: each thing once for the whole job."""
        first = decide(evidence) if evidence.trigger == "numbers" else None
        found = [*((first,) if first is not None else ()), *decide_all(evidence)]
        self._bundles.clear()
        out = []
        for verdict in found:
            if verdict.code not in self._told_silent:
                self._told_silent.add(verdict.code)
                out.append(Said(verdict))
                self._write(out[-1], evidence)
        return out

    def _is_told(self, verdict: Verdict) -> bool:
        """Whether a hang of these ranks has been reported and goes on: another name for it is no news."""
        standing = self._standing
        if standing is None or not verdict.can_go_on or not set(verdict.ranks) & set(standing.verdict.ranks):
            return False
        return standing.episode == self._where_they_are(standing.watched)

    def _where_they_are(self, ranks: Sequence[int]) -> tuple[object, ...]:
        """Changes when one of the ranks goes on."""
        rows = self._rows()
        return tuple((n, rows[n].marks, rows[n].step, rows[n].state) for n in ranks if n in rows)

    def _is_news(self, verdict: Verdict, now: float) -> bool:
        key = (verdict.code, verdict.ranks)
        if now - self._said.get(key, -QUIET_S) < QUIET_S:
            return False
        self._said[key] = now
        self._shown = verdict.head(), now
        return True

    def _write(self, said: Said, evidence: Evidence | None) -> None:
        assert self._job is not None
        keep(self._job.run_dir / "diagnosis", said.to_json(), evidence)

    # --- evidence ---

    def _evidence(
        self, trigger: str, rows: Mapping[int, Row], *, fresh: bool = False, sample_s: float = gather.SAMPLE_S
    ) -> Evidence:
        """All ranks: those of this node taken now (if `fresh`), others from their nodes' answers, else from rows."""
        job = self._job
        assert job is not None
        ranks: dict[int, Rank] = {}
        for info in self._nodes.values():
            for number in info.ranks:
                if number in rows:
                    ranks[number] = bundle.rank_of_row(rows[number], info.host, info.node_rank)
        others = remains.node_sent(self._nodes)
        for number, answer in self._bundles.items():
            ranks |= {r.rank: r for r in (from_json(Rank, v) for v in answer.get("ranks", ()))}
            if answer.get("node"):
                others[number] = from_json(Node, answer["node"])
        if trigger in QUIET_KINDS:
            ranks |= {r.rank: r for r in gather.take_quietly(self._poll.ranks(), job.record_dir)}
        elif fresh:
            taken = self._take(with_sockets=len(self._nodes) > 1, sample_s=sample_s)
            ranks |= {r.rank: r for r in taken}
        for number, ended in self._exits.items() if trigger not in QUIET_KINDS else ():
            if self._poll.world_size != job.world_size:
                ranks |= spawned.at_exit(ended, self._poll.ranks(), job.record_dir)
            else:
                ranks[number] = remains.rank_of(ended, job, self._nodes, ranks.get(number))
        nodes = bundle.nodes_of(job, self._nodes, self._own_node(), others)
        job = replace(job, world_size=self._poll.world_size)  # also of ranks that the script has started
        age_s = time.monotonic() - self._began
        return bundle.evidence_of(job, list(ranks.values()), nodes, trigger, age_s=age_s)

    def _take(self, *, with_sockets: bool, sample_s: float) -> tuple[Rank, ...]:
        """This node's live ranks."""
        job = self._job
        assert job is not None
        alive = [r for r in self._poll.ranks() if r.rank not in self._exits]
        taken = gather.take(
            alive,
            job.record_dir,
            with_sockets=with_sockets,
            with_models=True,
            sample_s=sample_s,
            is_over=any(e.failed for e in self._exits.values()),
        )
        taken = self._stood.mark(taken, time.monotonic())
        logs = {p.rank: p.log for p in job.ranks}
        return tuple(
            bundle.with_failure(r, logs[r.rank]) if is_dying(r) and r.rank in logs else r for r in taken
        )

    def _own_node(self) -> Node:
        assert self._job is not None
        return gather.node_of(Node(self._job.node_rank, self._job.host), self._oom_before)

    def _seen_at(self, rank: int) -> list[sampling.SeenAt]:
        """Where a rank of this node was seen lately."""
        assert self._job is not None
        found = next((r for r in self._poll.ranks() if r.rank == rank), None)
        return sampling.seen_at(found, self._job.record_dir)
