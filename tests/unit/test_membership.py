"""Does a wait for another rank end with what that rank did, and not with what happened after?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from allranks.comm.membership import Membership, wait_for_key
from allranks.core.errors import CommError

STORY = {"rank": 0, "host": "here", "error": "ValueError: no", "at": "train.py:3 in main"}


class Store:
    """In which another rank writes between two questions."""

    def __init__(self, comes: list[str]) -> None:
        self.has: set[str] = set()
        self.comes = iter(comes)

    def check(self, keys: list[str]) -> bool:
        found = all(key in self.has for key in keys)
        if keys == ["came"]:
            self.has.update(self.comes)  # right after the first time that it was asked
        return found

    def get(self, key: str) -> bytes:
        return json.dumps(STORY).encode() if key == "failed/1" else b"1"


def wait(*comes: str) -> bytes:
    place: Any = None
    return wait_for_key(Membership(place, Store(list(comes))), "came", 60, lambda: "rank 0 did not come")


def test_wait_when_the_rank_came_and_failed_after_that_then_the_wait_is_over() -> None:
    assert wait("came", "failed/1") == b"1"


def test_wait_when_a_rank_failed_and_the_key_did_not_come_then_its_story() -> None:
    with pytest.raises(CommError, match="AR020 rank 0 on host here failed first: ValueError: no") as caught:
        wait("failed/1")
    assert "rank 0 did not come" in str(caught.value)
