"""How does a rank write its recording? Lines of JSON, and the entries of tensors beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from allranks.parity.recording import MAX_VALUES


class Writer:
    """The two files of one rank."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        # "x": the first process of this rank is the rank; what it starts inherits its variables, and must not write.
        self._lines = (folder / f"rank{rank}.jsonl").open("x", encoding="utf-8")
        self._values = (folder / f"rank{rank}.values").open("xb")
        self._num_values = 0
        self.line("start", world_size=world_size)

    def line(self, event: str, **fields: Any) -> None:
        """One event; on the disk when this returns, so that a crash loses nothing."""
        self._values.flush()
        self._lines.write(json.dumps({"event": event, **fields}, default=str) + "\n")
        self._lines.flush()

    def print_of(self, name: str, tensor: torch.Tensor) -> list[Any]:
        """The fingerprint of a tensor, as a row for `line`."""
        tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        flat = tensor.reshape(-1)
        wide = (
            flat.to(torch.float64) if not flat.is_complex() else torch.view_as_real(flat).reshape(-1).double()
        )
        kept = wide
        if wide.numel() > MAX_VALUES:
            places = torch.linspace(0, wide.numel() - 1, MAX_VALUES, dtype=torch.float64, device=wide.device)
            kept = wide[places.round().long()]
        start, self._num_values = self._num_values, self._num_values + kept.numel()
        self._values.write(kept.cpu().numpy().tobytes())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return [
            name,
            tensor.numel(),
            dtype,
            float(wide.sum()),
            float(wide.square().sum()),
            start,
            kept.numel(),
        ]

    def close(self, reason: str) -> None:
        """The recording is complete."""
        if not self._lines.closed:
            self.line("end", reason=reason)
            self._lines.close()
            self._values.close()
