"""Which rules hold for every test? No test leaves anything behind (support/police.py), and which tests run beside each other."""

from __future__ import annotations

import pytest

pytest_plugins = ["support.police", "support.command", "support.cluster"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one module that start jobs share its fixtures, and those with a Slurm its ports: they stay in one process (xdist)."""
    for item in items:
        folder = item.path.parent.name
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm"))
        elif folder in ("e2e", "faults", "net"):
            item.add_marker(pytest.mark.xdist_group(f"{folder}-{item.path.stem}"))
