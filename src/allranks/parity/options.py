"""What is a recorded run told?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """What a recorded run is told, as JSON in ALLRANKS_PARITY_OPTIONS."""

    updates: int = 20
    """Updates after which every rank leaves the script."""
    dropout: bool = True
    autocast: bool = True
    seed: int = 0
    """Of the generators, before the script runs; the script's own seed wins."""
    loaders: list[dict[str, Any]] = field(default_factory=list)
    """The DataLoaders of the run on many ranks, as recorded: on one rank those with a DistributedSampler get batches as large as all
    ranks' together."""
    scale: int = 1
    """Ranks of that run."""
    scales_all: bool = False
    """Every DataLoader gets batches that much larger, whatever its sampler."""

    def as_json(self) -> str:
        return json.dumps(asdict(self))
