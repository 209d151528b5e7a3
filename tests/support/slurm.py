"""How does a test get a real Slurm? `with slurm(num_nodes=2) as env:`: daemons on this machine, side by side on 127.0.0.1.

No systemd, cgroups or database; free ports and a folder of its own, so several may run at once. Root, and the Debian packages
slurmctld, slurmd, slurm-client and munge. Everything it started is ended, by pid, with the block.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from support.processes import is_alive, kill, variable_holders, wait_until_gone

MARK = "ALLRANKS_TEST_SLURM"
IDLE_WITHIN_S = 40.0


@contextlib.contextmanager
def slurm(num_nodes: int, cpus: int = 4) -> Iterator[dict[str, str]]:
    """Start a cluster; gives the variables by which srun and sbatch find it."""
    folder = Path(
        tempfile.mkdtemp(prefix="allranks-slurm-", dir="/run")
    )  # munge cannot look into /root's temporary folders
    folder.chmod(0o755)
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    marked = {**os.environ, **env, MARK: folder.name}
    try:
        _munge(folder, marked)
        _write_config(folder, num_nodes, cpus)
        (folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\n"
        )  # named, so that slurmd looks for none
        _start(["slurmctld", "-c"], marked)
        for node in range(1, num_nodes + 1):
            _start(["slurmd", "-N", f"n{node}"], marked)
        _wait_until_idle(folder, marked)
        yield env
    finally:
        _end(folder)


def _start(command: list[str], env: dict[str, str]) -> None:
    program = shutil.which(command[0], path="/usr/sbin:/usr/bin:/sbin:/bin")
    assert program is not None, f"no {command[0]}"
    subprocess.run([program, *command[1:]], env=env, check=True, timeout=30, stdin=subprocess.DEVNULL)


def _munge(folder: Path, env: dict[str, str]) -> None:
    home = folder / "munge"
    home.mkdir()
    (home / "key").write_bytes(os.urandom(1024))
    (home / "key").chmod(0o400)
    for path in (home, home / "key"):
        shutil.chown(path, "munge", "munge")
    paths = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={home / name}" for option, name in paths.items()]
    _start(["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--force", *options], env)


def _write_config(folder: Path, num_nodes: int, cpus: int) -> None:
    host = socket.gethostname().split(".")[0]
    controller, *ports = _free_ports(num_nodes + 1)
    lines = [
        "ClusterName=allranks",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge/sock,cred_expire=5",  # a requeued job begins so many seconds later, and not 120
        "CredType=cred/munge",
        "SlurmUser=root",
        "SlurmdUser=root",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerParameters=sched_interval=1,batch_sched_delay=0",
        "KillWait=2",
        "SlurmdParameters=config_overrides",  # a node may claim more cores than there are
        f"StateSaveLocation={folder}/state",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log",
        f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmdLogFile={folder}/slurmd-%n.log",
    ]
    for node, port in enumerate(ports, 1):
        lines.append(
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000"
        )
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    for name in ("state", *(f"spool-n{node}" for node in range(1, num_nodes + 1))):
        (folder / name).mkdir()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _wait_until_idle(folder: Path, env: dict[str, str]) -> None:
    deadline = time.monotonic() + IDLE_WITHIN_S
    while time.monotonic() < deadline:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False
        )
        if set(done.stdout.split()) == {"idle"}:
            return
        time.sleep(0.2)  # slurmctld has no other sign of being ready
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in folder.glob("*.log"))
    raise AssertionError(f"the nodes are not idle after {IDLE_WITHIN_S:.0f} s\n{logs}")


def _end(folder: Path) -> None:
    """End the daemons and whatever they started; remove the folder."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        pids = _daemons(folder)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
        wait_until_gone(pids, 5)
    for pid in _daemons(folder):
        kill(pid)
    shutil.rmtree(folder, ignore_errors=True)


def _daemons(folder: Path) -> list[int]:
    # munged runs under another user's environment: runuser keeps ours, so the mark is there too.
    return [pid for pid in variable_holders(MARK, folder.name) if is_alive(pid)]
