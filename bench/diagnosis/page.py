"""What does a page of results say of when and how they were measured? Of one revision, or of which; on how busy a machine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def revision() -> str:
    """The revision whose code runs now; with a + where src is not as it was committed."""
    short = _git("rev-parse", "--short", "HEAD")
    return short + ("+" if _git("status", "--porcelain", "--", "src") else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def revisions(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """'revision 1234567', or all of them."""
    found = list(dict.fromkeys(str(row.get("revision", "an older one")) for row in kept.values()))
    return f"revision{'s' * (len(found) > 1)} {' and '.join(found)}"


def loads(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """'load 2 to 3, median 2.4': the jobs' own included."""
    found = sorted(float(row["load"]) for row in kept.values() if "load" in row)
    return (
        f"load {found[0]:.0f} to {found[-1]:.0f}, median {median(found):.1f}" if found else "load not noted"
    )
