"""AR816 full-precision-matmul: a GPU that has tf32 multiplies float32 matrices the slow way."""

from __future__ import annotations

from allranks.perf.view import Cause, View, who

CODE, NAME = "AR816", "full-precision-matmul"


def find(view: View) -> Cause | None:
    """By what the rank said of its device and of torch's settings."""
    ranks = tuple(
        r.rank
        for r in view.ranks
        if (f := view.replica(r.rank)).get("capability", 0) >= 80
        and f.get("matmul_precision") == "highest"
        and f.get("dtype") == "float32"
        and not f.get("autocast")
    )
    if not ranks:
        return None
    return Cause(
        CODE,
        NAME,
        f"{who(ranks, view.history.world_size)} multiply float32 matrices in full precision on "
        f"{view.replica(ranks[0]).get('device_name', 'a GPU')}, which has faster units for tf32 and bf16",
        'torch.set_float32_matmul_precision("high"), or bf16 autocast (allranks.start(precision="bf16")); '
        "results change in the last digits",
        ranks,
        0.0,
        0.05,
    )
