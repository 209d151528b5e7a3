"""Which seed does each random stream get? One number from the user, one derived seed per purpose, rank, epoch, sample."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *names: object) -> int:
    """A seed in [0, 2**63) for the stream called by `names`, e.g. derive_seed(0, "rank", 3); far apart for near names."""
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
