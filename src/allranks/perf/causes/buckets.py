"""AR808 buckets-do-not-fit: DDP's buckets are so large that nothing overlaps, or so small that each is a message of its own."""

from __future__ import annotations

from allranks.perf.values import ms
from allranks.perf.view import Cause, View

CODE, NAME = "AR808", "buckets-do-not-fit"
MIN_SHARE = 0.1
MANY, SMALL_BYTES = 32, 1 << 20
ONE_HAS = 0.8
LARGE_BYTES = 4 << 20


def find(view: View) -> Cause | None:
    """Only where the exchange that nothing hides is worth it."""
    for parts in view.ranks:
        sizes = view.replica(parts.rank).get("bucket_bytes") or []
        cost = parts.per_step("exchange")
        if not sizes or not parts.is_exchange_known or cost < MIN_SHARE * parts.step_s or len(view.ranks) < 2:
            continue
        total = sum(sizes)
        if len(sizes) >= MANY and total / len(sizes) < SMALL_BYTES:
            title = f"gradients are sent in {len(sizes)} buckets of {total / len(sizes) / 1024:.0f} KiB on average"
            wanted = max(1, round(total / 8 / (1 << 20)))
        elif total >= LARGE_BYTES and max(sizes) >= ONE_HAS * total:
            title = (
                f"one bucket holds {max(sizes) / total:.0%} of the gradients ({max(sizes) / 1e6:.1f} MB), so they are sent only "
                "when nearly all are there"
            )
            wanted = max(1, round(total / 6 / (1 << 20)))
        else:
            continue
        return Cause(
            CODE,
            NAME,
            f"{title}; {ms(cost)} of each step are not hidden behind the backward",
            f"DistributedDataParallel(..., bucket_cap_mb={wanted}), and measure again",
            tuple(r.rank for r in view.ranks),
            cost,
            cost / parts.step_s,
            (f"buckets: {', '.join(f'{s / 1e6:.2f}' for s in sizes[:8])}{' ...' * (len(sizes) > 8)} MB",),
        )
    return None
