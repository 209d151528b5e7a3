"""Is an error told that one rank met with and kept quiet, and none that says nothing of why ranks stand apart?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.core.job import RankExit
from allranks.record import layout as at
from allranks.record import thrown
from allranks.record.writer import Writer
from allranks.watch import source
from allranks.watch.caught import handlers_of, with_errors
from allranks.watch.decide import decide, decide_all
from allranks.watch.evidence import Evidence, Exit, Loader, Rank, Record, Words, from_json
from allranks.watch.observed import Caught
from allranks.watch.remains import Remains
from allranks.watch.verdict import Place, Verdict

HANDLER = Place("/home/ann/train.py", 31, "main", "except ValueError:")
BROKEN = Caught(
    ("ValueError", "Exception"),
    "sample 61 is broken",
    "the next batch",
    30,
    Place("/home/ann/data.py", 17),
    HANDLER,
)
LOST = Caught(
    ("RuntimeError", "Exception"),
    "[/pytorch/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:7590. This is typically caused by a crash",
    "backward", 39, Place("/home/ann/train.py", 36), HANDLER,
)  # fmt: skip


def uneven(*caught: tuple[Caught, ...], **changes: Any) -> Verdict | None:
    """Rank 1 has come to the end of its pass a batch before rank 0, which waits for gradients."""
    first = Record(
        step=39,
        phase="backward",
        phase_s=4.0,
        group_seq=80,
        loader=Loader(drawn=40, length=40),
        is_probed=True,
    )
    second = Record(
        step=39,
        phase="python",
        phase_s=4.0,
        group_seq=79,
        loader=Loader(drawn=39, length=40, is_exhausted=True),
    )
    ranks = [
        Rank(0, "gpu-a", pid=100, state="S", wchan="futex_do_wait", record=first, caught=caught[0]),
        replace(Rank(1, "gpu-a", pid=101, state="S", record=second, caught=caught[1]), **changes),
    ]
    return decide(Evidence(2, tuple(ranks), trigger="waiting", cwd="/home/ann"))


def test_error_of_one_rank_when_its_batches_are_fewer_then_it_is_told_with_the_except() -> None:
    verdict = uneven((), (BROKEN, BROKEN))
    assert verdict is not None
    assert (verdict.code, verdict.where[0]) == ("AR251", "train.py:31 in main:  except ValueError:")
    assert verdict.facts[0] == (
        "rank 1 went on after a ValueError in the next batch, step 31 (sample 61 is broken), raised at data.py:17, "
        "caught at train.py:31; and after 1 more"
    )
    assert verdict.fix.startswith("let the error end the job, or")


@pytest.mark.parametrize(
    ("caught", "changes"),
    [
        (((BROKEN,), (BROKEN,)), {}),  # every rank met with it
        (((), (LOST,)), {}),  # a consequence
        (((), (BROKEN,)), {"is_cleaning_up": True}),  # it may be on its way still
        (((), (BROKEN,)), {"exit": Exit(1, None, 5.0)}),  # it ended the rank
    ],
)
def test_error_when_it_does_not_tell_ranks_apart_then_it_is_not_told(caught: Any, changes: Any) -> None:
    verdict = uneven(*caught, **changes)
    assert verdict is None or not any("went on after" in fact for fact in verdict.facts)


def lost(*caught: Caught, **record: Any) -> list[str]:
    """What is said of rank 0, which noted these errors."""
    known = Record(**{"step": 40, "exit_kind": "ended", **record})
    ranks = (
        Rank(0, "gpu-a", pid=100, record=known, caught=caught),
        Rank(1, "gpu-a", pid=101, record=Record(step=39)),
    )
    return [v.head() for v in decide_all(Evidence(2, ranks, trigger="notes"))]


def test_lost_call_when_the_script_goes_on_then_it_is_said() -> None:
    said = "AR269 rank 0 on gpu-a went on after a backward had failed for want of the other ranks"
    assert lost(LOST) == [said]
    assert lost(LOST, exit_kind="", step=41) == [said]


@pytest.mark.parametrize(
    ("error", "record"),
    [
        (BROKEN, {}),  # another error than that of a lost peer
        (replace(LOST, what="barrier"), {}),  # brings nothing
        (replace(LOST, has_met_again=True), {}),  # began anew, in a new process group
        (replace(LOST, what="the next batch"), {}),  # of a data set on a network
        (LOST, {"exit_kind": "", "step": 39}),  # it may be about to end
        (
            LOST,
            {"exit_kind": "exception", "exception": Words("RuntimeError", "Connection closed")},
        ),  # it ended the rank
        (LOST, {"exit_code": 1, "step": 39}),
    ],
)
def test_lost_call_when_it_ends_the_rank_or_brings_nothing_then_nothing_is_said(
    error: Caught, record: Any
) -> None:
    assert lost(error, **record) == []


SOURCE = """try:
    try:
        train()
    except KeyboardInterrupt:
        save()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
    except ValueError:
        sys.exit(1)
    except OSError:
        raise
except Exception:
    done()
train()
"""


def test_handlers_then_of_each_try_innermost_first_within_the_function() -> None:
    outer = ((13, ("Exception",), True),)
    inner = (
        (4, ("KeyboardInterrupt",), True),
        (6, ("OutOfMemoryError", "RuntimeError"), True),
        (9, ("ValueError",), False),
        (11, ("OSError",), False),
    )
    assert source.handlers(SOURCE, 3) == (inner, outer)
    assert source.handlers(SOURCE, 5) == (outer,)
    assert source.handlers(SOURCE, 15) == source.handlers("try:", 1) == ()
    assert source.handlers("try:\n    def f():\n        g()\nexcept Exception:\n    pass\n", 3) == ()


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["RuntimeError", "Exception"], 6),
        (["OutOfMemoryError", "RuntimeError", "Exception"], 6),
        (["KeyError", "LookupError", "Exception"], 13),
        (["OSError", "Exception"], 13),
    ],
)
def test_note_of_an_error_then_the_except_that_takes_its_kind(
    tmp_path: Path, names: list[str], line: int
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    note = {
        "kind": thrown.KIND,
        "names": names,
        "text": "x",
        "what": "forward",
        "step": 3,
        "lines": [f"{file}:3 <module>"],
    }
    rank = with_errors(Rank(0, "gpu-a", pid=1, record=Record(noted=(note, {"kind": "saved"}))))
    (one,) = rank.caught
    assert one.handler is not None and (one.handler.line, one.where) == (
        line,
        Place(str(file), 3, "<module>", "train()"),
    )
    # It stands nowhere any more: what is around the line of its last error.
    assert [h.line for h in rank.handlers] == [6, 13] == [h.line for h in handlers_of([Place(str(file), 3)])]


def ended(rank: int, code: int, folder: Path, *notes: dict[str, Any]) -> RankExit:
    """A rank of this node that has ended, with its record page and notes."""
    record = Writer()
    record.open(str(folder))
    page = folder / f"{40 + rank}{at.SUFFIX}"
    Path(record.path or "").rename(page)
    page.with_name(f"{40 + rank}{at.NOTES_SUFFIX}").write_text("".join(json.dumps(n) + "\n" for n in notes))
    return RankExit(rank, "gpu-b", 1, code, None, 5.0, (), pid=40 + rank)


def test_rank_that_ended_well_on_another_node_then_its_errors_are_sent_and_nothing_where_there_are_none(
    tmp_path: Path,
) -> None:
    note = {
        "kind": thrown.KIND,
        "names": ["ValueError", "Exception"],
        "text": "x",
        "what": "forward",
        "step": 3,
        "lines": [],
    }
    kept = Remains()
    for one in (ended(1, 0, tmp_path, note), ended(2, 0, tmp_path), ended(3, 1, tmp_path)):
        kept.add(one, tmp_path)
    sent = [from_json(Rank, value) for value in kept.for_row()]
    assert [(r.rank, [e.step for e in r.caught]) for r in sent] == [(3, []), (1, [3])]


def test_note_of_an_error_when_the_rank_met_the_others_again_then_that_is_known() -> None:
    error, meets = {"kind": thrown.KIND, "names": ["RuntimeError"], "lines": []}, {"kind": "meets"}
    rank = with_errors(Rank(0, record=Record(noted=(meets, error, meets, error))))
    assert [e.has_met_again for e in rank.caught] == [True, False]


def test_note_of_an_error_when_the_first_except_passes_it_on_then_the_next_of_that_try_is_not_named(
    tmp_path: Path,
) -> None:
    file = tmp_path / "train.py"
    file.write_text("try:\n    train()\nexcept ValueError:\n    raise\nexcept Exception:\n    pass\n")
    note = {"kind": thrown.KIND, "names": ["ValueError", "Exception"], "lines": [f"{file}:2 <module>"]}
    (one,) = with_errors(Rank(0, record=Record(noted=(note,)))).caught
    assert one.handler is None
