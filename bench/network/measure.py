"""What does each way of sending save on a slow link? Two hosts of their own network namespaces, a link with a rate and a delay.

    sudo .venv/bin/python bench/network/measure.py                       100 Mbit/s, 20 ms there and back, one rank on each host
    sudo .venv/bin/python bench/network/measure.py --ranks-per-host 2 --ways "solo;ddp;none;bf16"

Trains the lm job (8 MB of gradients) with each way in turn, in the same processes, and prints a table: the median time of an update,
how much of it is communication (what `solo`, the same without any, does not take), how much of plain DDP's communication is taken
away, and the mean loss of the last eight updates. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
HOSTS = HERE.parents[1] / "tests" / "support" / "hosts" / "make_hosts.sh"
NET = "10.77.0"
EVERY = "solo;none;bf16;int8;powersgd;sync_every=16;sync_every=16, nesterov;sync_every=32;auto"


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-trip-ms", type=float, default=20)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ways", default=EVERY)
    return parser.parse_args()


def start(asked: argparse.Namespace, host: str, rank: int, env: dict[str, str]) -> subprocess.Popen[str]:
    """One rank on its host."""
    local = asked.ranks_per_host
    places = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": 2 * local, "LOCAL_WORLD_SIZE": local}
    return subprocess.Popen(
        [str(HOSTS), "exec", host, sys.executable, str(HERE / "job.py")],
        env={**env, **{name: str(value) for name, value in places.items()}},
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        text=True,
    )


def measure(asked: argparse.Namespace, folder: str) -> list[dict[str, object]]:
    """Bring the hosts up, train, take them down; a dict for each way."""
    prefix = f"b{os.getpid()}x"
    names = [f"{prefix}{number}" for number in (1, 2)]
    env = {
        **os.environ, "HOSTS_PREFIX": prefix, "HOSTS_NET": NET, "MASTER_ADDR": f"{NET}.1", "MASTER_PORT": "29533",
        "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "STEPS": str(asked.steps), "BATCH": str(asked.batch),
        "WAYS": asked.ways, "FOLDER": folder,
    }  # fmt: skip
    ranks: list[subprocess.Popen[str]] = []
    found: list[dict[str, object]] = []
    try:
        subprocess.run([str(HOSTS), "up", "2", "--tap"], env=env, check=True)
        for name in names:  # what a host sends and what it receives: a quarter of the way there and back each
            link = [f"delay_ms={asked.round_trip_ms / 4}", f"rate_mbit={asked.mbit}"]
            subprocess.run([str(HOSTS), "link", name, *link], env=env, check=True)
        ranks = [
            start(asked, names[r // asked.ranks_per_host], r, env) for r in range(2 * asked.ranks_per_host)
        ]
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                print(
                    f"  {found[-1]['way']}: {1e3 * float(str(found[-1]['update_s'])):.0f} ms", file=sys.stderr
                )
            else:
                sys.stderr.write(line)
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed: read what it printed")
    finally:
        for rank in ranks:
            rank.kill()
        subprocess.run([str(HOSTS), "down"], env=env, check=False)
    return found


def table(found: list[dict[str, object]]) -> str:
    """As docs/speed.md shows it."""
    by_name = {str(row["way"]): row for row in found}
    solo = float(str(by_name["solo"]["update_s"]))
    plain = by_name.get("ddp") or by_name["none"]
    whole = float(str(plain["update_s"])) - solo
    lines = [
        "| way | update | of it communication | less than plain DDP's | loss | to plain DDP's |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in by_name.items():
        update = float(str(row["update_s"]))
        less = "" if name == "solo" else f"{100 * (1 - (update - solo) / whole):.0f} %"
        chosen = f" (took {row['chosen']})" if row["chosen"] else ""
        ms, sent = f"{1e3 * update:.0f} ms", f"{1e3 * (update - solo):.0f} ms"
        loss = float(str(row["loss"]))
        far = "" if name == "solo" else f"{loss - float(str(plain['loss'])):+.3f}"
        lines.append(f"| {name}{chosen} | {ms} | {sent} | {less} | {loss:.3f} | {far} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print."""
    asked = arguments()
    with tempfile.TemporaryDirectory(prefix="allranks-network-") as folder:
        found = measure(asked, folder)
    print(
        f"{asked.mbit:g} Mbit/s, {asked.round_trip_ms:g} ms there and back, 2 hosts x {asked.ranks_per_host} rank(s), ",
        end="",
    )
    print(f"lm, batch {asked.batch}, load average {os.getloadavg()[0]:.1f}")
    print(table(found))


if __name__ == "__main__":
    main()
