"""What does a test need of the machine? Missing: skipped with the reason; in CI, where nothing may be missing, failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def need(reason: str, is_there: bool) -> None:
    """Go on only if it is there; `reason` says what to install or how to run."""
    if is_there:
        return
    if os.environ.get("CI"):
        pytest.fail(f"CI must not skip tests: {reason}")
    pytest.skip(reason)


def need_commands(*names: str) -> None:
    """Commands on PATH (or in /usr/sbin, which a user's PATH may lack)."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in names if shutil.which(name, path=path) is None]
    need(f"needs the commands {', '.join(missing)}", not missing)


def need_namespaces() -> None:
    """Root, iproute2, and a kernel that lets us make network namespaces."""
    need("hosts as network namespaces need Linux", sys.platform == "linux")
    need("hosts as network namespaces need root", os.geteuid() == 0)
    need_commands("ip", "unshare", "nsenter", "pgrep")
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, check=False)
    need("this kernel or container does not allow new namespaces", tried.returncode == 0)


def need_folder(folder: Path, package: str) -> None:
    """A folder that a Debian package brings."""
    need(f"needs {folder}: apt-get install {package}", folder.is_dir())
