# ranks 2; expect AR202; says rank 1 .*(out of memory|OOM); needs memory cgroups; limit 30
import os, subprocess
from pathlib import Path
from job import RANK, mark, start, train

def small_memory():
    """Move this process into a memory cgroup of its own, a little larger than what it uses now."""
    version1 = Path("/sys/fs/cgroup/memory")
    root, limit = (version1, "memory.limit_in_bytes") if version1.exists() else (Path("/sys/fs/cgroup"), "memory.max")
    group = root / f"allranks-fault-{os.getpid()}"
    group.mkdir()
    (group / limit).write_text(str(120 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    clean = f"while [ -d /proc/{os.getpid()} ]; do sleep 0.2; done; sleep 3; rmdir {group}"
    subprocess.Popen(["sh", "-c", f"echo $$ > {root}/cgroup.procs; {clean}"], env={}, start_new_session=True)

def fault(step, model):
    if RANK == 1 and step == 12:
        small_memory()
        mark()
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20) * 8))

start()
train(fault)
