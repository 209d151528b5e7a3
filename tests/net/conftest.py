"""What do the tests on several hosts share? The fixture make_hosts (support/cluster.py), and their marker."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in this folder is marked `net`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.net)
