"""Is what a killed launcher left in shared memory removed, and nothing else?"""

from __future__ import annotations

import os
from pathlib import Path

from allranks.run import node_dir


def left_by_a_dead_agent(base: Path, name: str) -> Path:
    folder = base / name
    os.close(node_dir.claim(folder))  # the lock ends with its holder
    (folder / "record").mkdir()
    return folder


def test_claim_when_an_agent_died_with_its_guard_then_its_folder_is_removed(tmp_path: Path) -> None:
    dead = left_by_a_dead_agent(tmp_path, "allranks-0123456789ab-77")
    os.close(node_dir.claim(tmp_path / "allranks-aaaaaaaaaaaa-78"))
    assert not dead.exists()


def test_claim_when_an_agent_lives_then_its_folder_stays(tmp_path: Path) -> None:
    living = tmp_path / "allranks-0123456789ab-77"
    lock = node_dir.claim(living)
    os.close(node_dir.claim(tmp_path / "allranks-aaaaaaaaaaaa-78"))
    assert living.exists()
    os.close(lock)


def test_remove_stale_when_it_is_not_ours_then_it_stays(tmp_path: Path) -> None:
    other = left_by_a_dead_agent(tmp_path, "allranks-record-12-abc")
    bare = tmp_path / "allranks-0123456789ab-79"
    bare.mkdir()
    target = tmp_path / "precious"
    target.mkdir()
    (target / node_dir.LOCK).touch()
    (tmp_path / "allranks-0123456789ac-80").symlink_to(target)
    node_dir.remove_stale(tmp_path)
    assert other.exists()
    assert bare.exists()
    assert target.exists()


def test_claim_when_the_folder_cannot_be_made_then_minus_one(tmp_path: Path) -> None:
    assert node_dir.claim(tmp_path / "missing" / "allranks-0123456789ab-1") == -1
