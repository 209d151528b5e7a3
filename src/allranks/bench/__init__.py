"""How quick is a script on 1, 2, 4 ... ranks, and with each way of exchanging gradients? `allranks bench` (docs/how-to/bench.md)."""

from __future__ import annotations
