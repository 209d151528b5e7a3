"""What is a rank in that keeps no record (a plain script under torchrun)? Told from its stack, and from whether it ran at all meanwhile.

Its step, which call of how many it is in, and what a tensor holds is not known then; who waits, and who does not come, is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from allranks.watch.evidence import Call, Rank, Record
from allranks.watch.reading import with_code
from allranks.watch.stacks import main_stack, user_place
from allranks.watch.verdict import Place

_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_DDP = "/torch/nn/parallel/distributed.py"
_OURS = "/allranks/comm/"  # gradients that are exchanged through shared memory
_ENGINE = ("/torch/autograd/graph.py", "/torch/autograd/__init__.py")


def with_record(rank: Rank, stood_s: float) -> Rank:
    """The rank with what its stack tells in place of a record.

    Args:
        rank: As it was seen just now.
        stood_s: How long its main thread has not run at all, so that it has been where it is; 0 if it has.
    """
    main = main_stack(rank.stacks)
    if rank.record is not None or main is None or not main.frames:
        return rank
    phase, op = what_of(main.frames)
    if not stood_s and phase != "init":
        phase, op = "python", ""  # it goes on: no sign that it waits for others
    place = user_place(main.frames)
    where = with_code(place) if place else None
    calls = (Call(op, where=where, age_s=stood_s, is_inside=True),) if op else ()
    return replace(
        rank, record=Record(phase=phase, phase_s=stood_s, where=where, calls=calls, has_torch=True)
    )


def what_of(frames: Sequence[Place]) -> tuple[str, str]:
    """(phase, the collective if it is in one) of a main thread that stands at these frames, innermost first."""
    called = [f for f in frames if f.file.endswith(_COLLECTIVES) and not f.function.startswith("_")]
    names = [f.function for f in called if f.function not in ("wrapper", "barrier_if_needed")]
    if "init_process_group" in names:
        return "init", ""
    if names:
        return "collective", names[-1]  # the outermost: what the user's line calls
    in_ddp = [f.function for f in frames if f.file.endswith(_DDP)]
    if "__init__" in in_ddp:
        return "build", ""
    if frames[0].file.endswith(_ENGINE):
        return "backward", ""
    if _OURS in frames[0].file and any(f.file.endswith(_ENGINE) for f in frames):
        return "backward", ""
    return ("forward", "") if frames[0].file.endswith(_DDP) else ("python", "")
