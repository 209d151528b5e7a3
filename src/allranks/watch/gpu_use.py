"""How fast do the GPUs of this host run, and what holds them back? By NVML, if its Python module is there; never in a rank.

`pip install nvidia-ml-py` gives the module `pynvml`. Without it, without a driver, or in a container that shows other pids, there is
nothing to say, and nothing is said.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from allranks.watch import proc

LOOK_EVERY_S = 5.0
"""NVML takes some ms a device, and clocks are not limited for less than seconds."""
ROW = ("rank", "mhz", "most_mhz", "celsius", "reasons", "busy_percent")


class Gpus:
    """NVML, loaded at the first look, and left alone after its first error."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._is_off, self._next = False, 0.0

    def look(self, ranks: dict[int, int]) -> list[list[int]]:
        """A row, as ROW says, for each rank whose GPU is known. Never raises."""
        now = time.monotonic()
        if self._is_off or now < self._next:
            return []
        self._next = now + LOOK_EVERY_S
        try:
            if self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
                self._nvml.nvmlInit()
            return [[rank, *self._of(device)] for rank, device in self._devices(ranks).items()]
        except Exception:  # noqa: BLE001 - no module, no driver, no right: each has an error class of its own
            self._is_off = True
            return []

    def _devices(self, ranks: dict[int, int]) -> dict[int, Any]:
        """The GPU of each rank: the one that says its process runs there, else by CUDA_VISIBLE_DEVICES and LOCAL_RANK."""
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(k) for k in range(nvml.nvmlDeviceGetCount())]
        running = [{p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(h)} for h in handles]
        found = {}
        for rank, pid in ranks.items():
            on = [h for h, pids in zip(handles, running, strict=True) if pid in pids]
            if len(on) == 1:
                found[rank] = on[0]
            elif not on and any(running) and (k := _index_of(pid)) is not None and k < len(handles):
                found[rank] = handles[k]
        return found

    def _of(self, device: Any) -> list[int]:
        nvml = self._nvml
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        return [
            int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
            int(nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM)),
            int(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
            int(reasons(device)),
            int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
        ]


def _index_of(pid: int) -> int | None:
    """The GPU that a rank's own environment names."""
    local = proc.environment(pid, "LOCAL_RANK")
    visible = proc.environment(pid, "CUDA_VISIBLE_DEVICES")
    if not local.isdigit():
        return None
    if not visible:
        return int(local)
    names = visible.split(",")
    name = names[int(local)].strip() if int(local) < len(names) else ""
    return int(name) if name.isdigit() else None
