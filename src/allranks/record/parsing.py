"""What do the words of a page mean? From its bytes to the values of values.py."""

from __future__ import annotations

from collections.abc import Sequence

from allranks.record import layout as at
from allranks.record import values

_KINDS = {at.NAN: "nan", at.PLUS_INF: "inf", at.MINUS_INF: "-inf"}


class NotARecord(ValueError):
    """The file is no record page, or of another version."""


def marks_of(w: Sequence[int]) -> int:
    """A number that is another after each mark; light ones keep no clock."""
    return hash((w[at.W_SINCE_NS], w[at.W_PHASE], w[at.W_STEP], w[at.W_MICRO_STEP]))


class Words:
    """The words of a page, from its bytes.

    Raises:
        NotARecord: It is no page, is not yet filled, or of another version.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) != at.PAGE_BYTES:
            raise NotARecord(f"the file has {len(data)} bytes, a record page has {at.PAGE_BYTES}")
        self.data = data
        self.words = memoryview(data).cast("q")
        if self.words[at.W_MAGIC] != at.MAGIC or self.words[at.W_VERSION] != at.VERSION:
            raise NotARecord(f"no record page of version {at.VERSION}")

    def string(self, number: int) -> str:
        """The string that `number` names; "" if it has been written over since."""
        word = number & 0xFFFF
        is_place = at.STRINGS <= word < at.STRINGS_END or at.SEEN <= word < at.W_SAMPLE_UNTIL_NS
        if not is_place or self.words[word] != number:
            return ""
        return self.text(word + 1, at.MAX_STRING_BYTES)

    def text(self, word: int, most: int) -> str:
        """A length in bytes at `word`, then the bytes."""
        length = self.words[word]
        if not 0 < length <= most:
            return ""
        start = 8 * (word + 1)
        return self.data[start : start + length].decode("utf-8", "replace")

    def record(self, path: str, timed_after: int = 0) -> values.Record:
        w = self.words
        flags, phase = w[at.W_FLAGS], w[at.W_PHASE] & 0xFF
        return values.Record(
            path=path,
            version=w[at.W_VERSION],
            pid=w[at.W_PID],
            parent_pid=w[at.W_PARENT],
            host=self.text(at.HOST, 8 * at.HOST_WORDS - 8),
            command=self.text(at.COMMAND, 8 * at.COMMAND_WORDS - 8),
            start_ns=w[at.W_START_NS],
            start_unix_ns=w[at.W_START_UNIX_NS],
            role=values.Role(w[at.W_ROLE]),
            rank=w[at.W_RANK],
            world_size=w[at.W_WORLD_SIZE],
            local_rank=w[at.W_LOCAL_RANK],
            worker_id=w[at.W_WORKER_ID],
            stack_signal=w[at.W_STACK_SIGNAL],
            has_torch=bool(flags & at.TORCH_IMPORTED),
            is_probed=bool(flags & at.PROBED),
            is_library_stepped=bool(flags & at.LIBRARY_STEPS),
            is_in_process=bool(flags & at.IN_PROCESS),
            has_stepped_aside=bool(flags & at.STEPPED_ASIDE),
            was_forked=bool(flags & at.FORKED),
            ticks=w[at.W_TICKS],
            tick_ns=w[at.W_TICK_NS],
            asked=w[at.W_ASK],
            answered=w[at.W_ANSWERED],
            marks=marks_of(w),
            phase=values.Phase(phase),
            phase_since_ns=w[at.W_SINCE_NS],
            line=self.string(w[at.W_PHASE] >> 8),
            is_light=bool(w[at.W_LIGHT]),
            seen_phase=values.Phase(w[at.W_SEEN] & 0xFF),
            seen_line=self.string(w[at.W_SEEN] >> 8),
            phase_ns={p: w[at.CUM_NS + p] for p in values.Phase},
            step=w[at.W_STEP],
            micro_step=w[at.W_MICRO_STEP],
            epoch=w[at.W_EPOCH],
            step_ends_ns=tuple(sorted(ns for ns in w[at.STEP_ENDS : at.STEP_ENDS + at.NUM_STEP_ENDS] if ns)),
            step_ended=w[at.STEP_ENDED],
            issued=w[at.W_ISSUED],
            issued_at_step=w[at.W_STEP_ISSUED],
            group_seq=max(w[at.W_GROUP_SEQ], w[at.W_STEP_SEQ]),
            group_seq_at_step=w[at.W_STEP_SEQ],
            group_seq_step=w[at.W_SEQ_STEP],
            num_groups=w[at.W_GROUPS],
            collectives=self.collectives(),
            loader=self.loader(at.LOADER),
            loader_before=self.loader(at.LOADER_BEFORE),
            loader_worker_pids=tuple(
                p for p in w[at.LOADER_PIDS : at.LOADER_PIDS + at.NUM_LOADER_PIDS] if p > 0
            ),
            sample_count=w[at.SAMPLE_COUNT],
            sample_task=w[at.SAMPLE_TASK],
            sample_at=w[at.SAMPLE_INDEX],
            samples=tuple(w[at.SAMPLES : at.SAMPLES + max(0, min(w[at.SAMPLE_COUNT], at.NUM_SAMPLES))]),
            sample_ns=w[at.SAMPLE_NS],
            last_gradient=self.string(w[at.W_LAST_GRAD]),
            unused=self.string(w[at.W_UNUSED]),
            model=self.model(),
            exception=self.last_words(at.EXCEPTION),
            thread_exception=self.last_words(at.THREAD_EXCEPTION),
            exit=self.exit(),
            destroyed_ns=w[at.W_DESTROYED_NS],
            not_finite=self.not_finite(),
            checks=self.checks(),
            times=self.times(),
            timed=self.timed(timed_after),
        )

    def collectives(self) -> tuple[values.Collective, ...]:
        found = [self.collective(at.RING + at.SLOT_WORDS * slot) for slot in range(at.NUM_SLOTS)]
        return tuple(sorted((c for c in found if c is not None), key=lambda c: c.number))

    def collective(self, base: int) -> values.Collective | None:
        w = self.words[base : base + at.SLOT_WORDS]
        if w[at.S_HEAD] <= 0 or w[at.S_HEAD] != w[at.S_TAIL]:
            return None
        dims = max(0, min(w[at.S_NDIM], at.NUM_DIMS))
        return values.Collective(
            number=w[at.S_HEAD],
            op=self.string(w[at.S_OP]),
            group=self.string(w[at.S_GROUP]),
            ranks=self.string(w[at.S_RANKS]),
            seq=w[at.S_SEQ],
            reduce_op=self.string(w[at.S_REDUCE]),
            root=w[at.S_ROOT],
            dtype=self.string(w[at.S_DTYPE]),
            shape=tuple(w[at.S_DIMS : at.S_DIMS + dims]),
            numel=w[at.S_NUMEL],
            num_tensors=w[at.S_TENSORS],
            line=self.string(w[at.S_LINE]),
            thread=self.string(w[at.S_THREAD]),
            step=w[at.S_STEP],
            entered_ns=w[at.S_ENTERED],
            exited_ns=w[at.S_EXITED],
            is_async=bool(w[at.S_FLAGS] & at.ASYNC),
            was_waited=bool(w[at.S_FLAGS] & at.WAITED),
            has_failed=bool(w[at.S_FLAGS] & at.FAILED),
        )

    def loader(self, base: int) -> values.Loader | None:
        is_asked = base == at.LOADER and self.words[at.W_PHASE] & 0xFF == at.DATA
        w = self.words[base : base + 8]
        if w[at.L_NUMBER] <= 0:
            return None
        return values.Loader(
            number=w[at.L_NUMBER],
            drawn=w[at.L_DRAWN],
            length=w[at.L_LENGTH],
            line=self.string(w[at.L_LINE]),
            num_workers=w[at.L_NUM_WORKERS],
            started_ns=w[at.L_STARTED_NS],
            ended_ns=w[at.L_ENDED_NS],
            asked_ns=self.words[at.W_SINCE_NS] if is_asked else 0,
        )

    def model(self) -> values.Model | None:
        w = self.words
        if w[at.W_MODELS] <= 0:
            return None
        return values.Model(w[at.W_MODELS], w[at.W_MODEL_PARAMS], w[at.W_MODEL_HASH])

    def not_finite(self) -> values.NotFinite | None:
        step, kind, line, at_ns, sound = self.words[at.NOT_FINITE : at.NOT_FINITE + 5]
        if step <= 0:
            return None
        return values.NotFinite(step, _KINDS.get(kind, "nan"), self.string(line), at_ns, sound)

    def checks(self) -> tuple[values.Check, ...]:
        found = []
        for base in range(at.CHECKS, at.CHECKS + at.NUM_CHECKS * at.CHECK_WORDS, at.CHECK_WORDS):
            step, seq, digest, tail = self.words[base : base + at.CHECK_WORDS]
            if step > 0 and step == tail:
                found.append(values.Check(step, seq & 0xFFFFFFFF, digest, seq >> 32))
        return tuple(sorted(found, key=lambda check: check.step))

    def times(self) -> values.Times | None:
        w = self.words[at.TIMES : at.TIMES + at.TIMES_WORDS]
        if not w[at.T_HEAD] or w[at.T_HEAD] != w[at.T_TAIL]:
            return None
        return values.Times(
            at_ns=w[at.T_HEAD],
            step=w[at.T_STEP],
            phase_ns={p: w[at.T_PHASES + p] for p in values.Phase},
            buffers_ns=w[at.T_BUFFERS_NS],
            exchanged_ns=w[at.T_EXCHANGED_NS],
            exchanged_of_ns=w[at.T_EXCHANGED_OF_NS],
            loss=w[at.T_LOSS] / 1e6 if w[at.T_HAS_LOSS] else None,
        )

    def timed(self, after: int) -> tuple[values.TimedStep, ...]:
        found = []
        for base in range(at.TIMED, at.TIMED + at.NUM_TIMED * at.TIMED_WORDS, at.TIMED_WORDS):
            if self.words[base] <= after:  # most of them: the agent reads several times a second
                continue
            step, *moments, tail = self.words[base : base + at.TIMED_WORDS]
            if step > 0 and step == tail:
                found.append(values.TimedStep(step, *moments))
        return tuple(sorted(found, key=lambda timed: timed.step))

    def last_words(self, base: int) -> values.LastWords | None:
        if not self.words[base]:
            return None
        parts = self.text(base + 1, 8 * at.LAST_WORDS_WORDS - 16).split("\0")
        if len(parts) != 4:
            return None
        return values.LastWords(parts[0], parts[1], parts[2], parts[3], self.words[base])

    def exit(self) -> values.Exit:
        w = self.words
        kind = values.ExitKind(w[at.W_EXIT_KIND])
        return values.Exit(kind, w[at.W_EXIT_CODE], self.string(w[at.W_EXIT_LINE]), w[at.W_EXIT_NS])
