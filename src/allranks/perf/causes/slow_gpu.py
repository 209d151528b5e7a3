"""AR817 gpu-held-back: a GPU runs below its clock while it works."""

from __future__ import annotations

from allranks.perf.hosts import slow_gpus
from allranks.perf.view import Cause, View, who

CODE, NAME = "AR817", "gpu-held-back"


def find(view: View) -> Cause | None:
    """By what NVML says of the GPUs of this job's ranks."""
    if not view.ranks:
        return None
    slow = slow_gpus(view.history, min(r.since for r in view.ranks), max(r.until for r in view.ranks))
    if not slow:
        return None
    worst = min(slow, key=lambda gpu: gpu.mhz)
    ranks = tuple(gpu.rank for gpu in slow)
    lost = max(0.0, 1.0 - worst.mhz / worst.most_mhz) if worst.most_mhz else 0.0
    return Cause(
        CODE,
        NAME,
        f"the GPU of {who(ranks, view.history.world_size)} is held back by {worst.why} in {worst.share:.0%} of the looks: "
        f"{worst.mhz:.0f} of {worst.most_mhz} MHz, {worst.celsius} degrees",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE on that host; look at its cooling and power, reset a clock that was set "
        "(nvidia-smi -rgc), or leave that GPU out",
        ranks,
        lost * view.mean("backward") if lost else 0.0,
        max(0.02, lost * view.share("backward")),
    )
