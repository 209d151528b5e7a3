"""AR200 rank-raised: an exception of the user's program ended a rank."""

from __future__ import annotations

import re
from dataclasses import replace

from allranks.watch.case import Case
from allranks.watch.evidence import Failure, Rank
from allranks.watch.verdict import Verdict, many

CODE, NAME = "AR200", "rank-raised"

#: (what kind and message match, what to do): the first that matches is the advice.
_ADVICE = (
    (
        r"CUDA out of memory|OutOfMemoryError|MemoryError|can't allocate memory",
        "use a smaller micro-batch, or find what this rank holds that the others do not",
    ),
    (
        r"IndexError|out of bounds|out of range",
        "look at the data this rank was given: print the batch at the line above; the other ranks only lost their peer",
    ),
    (
        r"cannot pickle .*ProcessGroup",
        "keep the process group out of the object that is copied or saved (del self.group, or define __getstate__); save state_dict()",
    ),
    (
        r"unrecognized arguments:.*local[-_]rank",
        "read LOCAL_RANK from the environment: int(os.environ['LOCAL_RANK']); add_argument('--local-rank', '--local_rank') accepts both",
    ),
    (
        r"PytorchStreamReader|UnpicklingError|invalid load key|unexpected EOF|Ran out of input|zip archive",
        "the file is damaged: if several ranks write one path, let rank 0 alone write it, to another name, then os.replace()",
    ),
    (
        r"No such file|FileNotFound|does not exist",
        "if another rank makes this path, put a dist.barrier() between making and using it, on all ranks",
    ),
    (
        r"KeyError: .*\w\.\w|size mismatch|Missing key|Unexpected key",
        "compare the names: a DDP model's state_dict has 'module.' in front, a compiled one's '_orig_mod.'",
    ),
    (
        r"EOFError|EOF when reading a line",
        "a rank has no terminal to read from; take the value from the command line",
    ),
    (
        r"Unable to find address for|(socket|network) interface",
        "GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME names an interface this host has not; `ip -br addr` shows them",
    ),
    (
        r"[Aa]ddress already in use",
        "all ranks of a host share its ports: let one rank listen, or add LOCAL_RANK to the number of the port",
    ),
    (r"KeyboardInterrupt", "somebody pressed Ctrl-C"),
)


def find(case: Case) -> Verdict | None:
    raised = [r for r in case.roots if failure_of(r) is not None]
    if not raised or (case.roots and case.roots[0] not in raised):
        return None
    first = failure_of(raised[0])
    assert first is not None
    same = [
        r for r in raised if (f := failure_of(r)) and (f.kind, f.frames[:1]) == (first.kind, first.frames[:1])
    ]
    message = first.message.split("\n")[0]
    whole = f"{first.kind}: {message}" if message else first.kind
    facts = [whole]
    if (record := raised[0].record) and (at := [n for n in record.noted if n.get("kind") == "unpicklable"]):
        facts.append(f"what cannot be pickled is {at[0].get('path')}")
    if first.cause:
        facts.append(f"raised from {first.cause}")
    if len(same) == 1 and len(raised) > 1:
        facts.append(f"{case.who(raised[1:])} raised later: a consequence, or the same fault")
    if case.victims:
        facts.append(
            f"{case.who(case.victims)} only lost {many([r.rank for r in same], 'its peer', 'their peers')}: a consequence"
        )
    verdict = case.verdict(
        CODE,
        NAME,
        f"{case.who(same)} raised {_clip(whole)}",
        same,
        where=case.frames(first.frames),
        facts=facts,
        fix=advice(first) or "see its traceback above; nothing can go on without this rank",
        others=case.others([r.rank for r in (*same, *case.victims)]),
        can_go_on=False,
    )
    return replace(verdict, quoted=first.text[-40:], since_s=None)


def failure_of(rank: Rank) -> Failure | None:
    """The exception that ended the rank: from its traceback, else from its own last words."""
    if rank.failure is not None:
        return rank.failure
    words = rank.record.exception if rank.record else None
    if words is None or words.kind in ("SystemExit", "KeyboardInterrupt"):
        return None
    return Failure(words.kind, words.message, (words.where,) if words.where else ())


def advice(failure: Failure) -> str:
    """What to do about a well-known exception."""
    text = f"{failure.kind}: {failure.message}"
    return next((fix for pattern, fix in _ADVICE if re.search(pattern, text)), "")


def _clip(text: str, most: int = 110) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
