"""AR809 unused-searched-for-nothing: find_unused_parameters walks the graph in every step, and all parameters are used."""

from __future__ import annotations

from allranks.perf.view import Cause, View

CODE, NAME = "AR809", "unused-searched-for-nothing"
MIN_LOOKED = 10


def find(view: View) -> Cause | None:
    """Where DDP has looked at several steps and every rank used everything in all of them."""
    found = [view.replica(r.rank) for r in view.ranks]
    if not found or not all(f.get("find_unused_parameters") and not f.get("static_graph") for f in found):
        return None
    if any(f.get("unused_bytes", 1) or f.get("steps", 0) < MIN_LOOKED for f in found):
        return None
    return Cause(
        CODE,
        NAME,
        "find_unused_parameters=True makes DDP walk the whole graph in every step, and it found no unused parameter on any rank",
        "leave find_unused_parameters out; if a parameter is unused in some steps after all, the error names it",
        tuple(r.rank for r in view.ranks),
        0.0,
        0.01,
        (f"looked at {min(f['steps'] for f in found)} steps on every rank",),
    )
