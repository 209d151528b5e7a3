"""allranks: from one GPU to every rank.

Public names are loaded when they are first used, so that importing allranks costs nothing and does nothing.
"""

from __future__ import annotations

# Every process of a job imports this file: typing alone would be most of what it costs. Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from allranks.core.errors import AllranksError, AllranksWarning
    from allranks.data import RankLoader, make_loader
    from allranks.metrics import Sink
    from allranks.train import Run, Update, start
    from allranks.wrap import Ema, Model

__version__ = "0.1.0"

__all__ = [
    "AllranksError",
    "AllranksWarning",
    "Ema",
    "Model",
    "RankLoader",
    "Run",
    "Sink",
    "Update",
    "make_loader",
    "start",
]

_HOMES = {
    "AllranksError": "allranks.core.errors",
    "AllranksWarning": "allranks.core.errors",
    "Ema": "allranks.wrap",
    "Model": "allranks.wrap",
    "RankLoader": "allranks.data",
    "Run": "allranks.train",
    "Sink": "allranks.metrics",
    "Update": "allranks.train",
    "make_loader": "allranks.data",
    "start": "allranks.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'allranks' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
