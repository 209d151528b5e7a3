"""Does memory that one step has freed stay for the next one: within which bounds, and not where the user says otherwise?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.core import heap
from allranks.core.heap import keep_freed_memory, usable_memory

# What 20 steps of a training do: take 32 MB in two blocks, write into them, give them back. Prints how often the kernel had to help.
STEPS = """
import ctypes, resource, sys
from allranks.core.heap import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
kept = keep_freed_memory(1) if sys.argv[1] == "keep" else 0
def step():
    blocks = [libc.malloc(16 << 20) for _ in range(2)]
    for block in blocks: libc.memset(block, 1, 16 << 20)
    for block in blocks: libc.free(block)
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20): step()
print(kept > 0, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc only")


def faults(how: str, **environ: str) -> tuple[str, int]:
    """What the process prints: whether it keeps memory, and its page faults."""
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how], env=environ, capture_output=True, text=True, check=True
    )
    is_kept, count = done.stdout.split()
    return is_kept, int(count)


def test_steps_when_freed_memory_is_kept_then_the_kernel_is_not_asked_again() -> None:
    assert faults("leave")[1] > 20 * 4096  # 16 MB are 4,096 pages
    is_kept, count = faults("keep")
    assert is_kept == "True"
    assert count < 4096


def test_keep_when_the_user_has_set_malloc_then_it_is_left_alone() -> None:
    is_kept, count = faults("keep", MALLOC_TRIM_THRESHOLD_="131072")
    assert is_kept == "False"
    assert count > 20 * 4096
    assert keep_freed_memory(1, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}) == 0


@pytest.mark.parametrize(("most_block", "expected"), [(1 << 25, [-3, -1]), (0, [])])
def test_keep_when_glibc_refuses_large_blocks_then_smaller_ones_are_kept_or_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, most_block: int, expected: list[int]
) -> None:
    taken: list[int] = []

    def mallopt(option: int, value: int) -> int:  # as that of glibc 2.34
        if option == -3 and value > most_block:
            return 0
        taken.append(option)
        return 1

    monkeypatch.setattr(heap, "_mallopt", lambda: mallopt)
    assert (keep_freed_memory(1, {}) > 0) is bool(expected)
    assert taken == expected


def test_memory_when_a_container_has_less_then_its_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert usable_memory(proc, cgroup) > 1 << 20  # no cgroups: the host's
    for name, text in {
        "proc/self/cgroup": "0::/pod/box\n",
        "cgroup/pod/memory.max": "4096000\n",
        "cgroup/pod/box/memory.max": "max\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_memory(proc, cgroup) == 4096000


def test_memory_when_cgroups_are_of_version_one_then_their_limit_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    for name, text in {
        "proc/self/cgroup": "9:cpu:/job\n5:memory:/job\n",
        "cgroup/memory/job/memory.limit_in_bytes": "8192000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_memory(proc, cgroup) == 8192000
