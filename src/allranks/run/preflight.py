"""What is wrong before anything starts? Checks of this node that take no time, each with its own error.

What only the other nodes know (numbers that differ, nodes that do not come) is the roster's and the hub's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from allranks.core.errors import StartError
from allranks.run import network
from allranks.run.options import Options

Role = Literal["alone", "hub", "member"]


def check_script(options: Options, env: Mapping[str, str]) -> None:
    """Raises StartError AR040 or AR041 if there is no script to start. A module is left to python to find."""
    if options.module:
        return
    path = Path(options.script)
    if options.no_python:
        if shutil.which(options.script, path=env.get("PATH")) is None:
            raise StartError(
                "AR040",
                f"program {options.script} cannot be started",
                why="it is not executable"
                if path.exists()
                else "there is no such file, and it is not on PATH",
                fix=f"chmod +x {options.script}"
                if path.exists()
                else "check the path (with ./ for a program in this folder)",
            )
        return
    if path.is_dir():
        if (path / "__main__.py").exists():
            return
        raise StartError(
            "AR041",
            f"script {options.script} is a directory",
            fix=f"allranks run ... {options.script}/train.py",
        )
    if not path.exists():
        raise StartError(
            "AR040",
            f"script {options.script} does not exist",
            why=f"looked for {path.absolute()}",
            fix=_nearest(path),
        )


def _nearest(path: Path) -> str:
    import difflib

    folder = path.parent if path.parent.is_dir() else Path()
    names = [p.name for p in folder.glob("*.py")] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    if close:
        return f"did you mean {folder / close[0]}?"
    return "check the path; options for allranks stand before the script, the script's own after it"


def role(options: Options) -> Role:
    """Is this node alone, the one where the nodes meet, or one that goes there?

    Raises:
        StartError: AR038 the address does not resolve.
    """
    if options.max_nodes == 1:
        if options.host:
            _addresses(options.host)
        return "alone"
    addresses = _addresses(options.host)
    said = options.conf.get("is_host", "").lower()
    if said:
        return "hub" if said in ("1", "true", "yes") else "member"
    if options.node_rank is not None:
        return "hub" if options.node_rank == 0 else "member"
    if options.backend == "static":
        raise StartError(
            "AR039",
            f"--nnodes {options.max_nodes} without --node-rank",
            why="the static backend (the default) needs the number of each node",
            fix="--node-rank 0 on the first node, 1 on the next ...; or --rdzv-backend c10d --rdzv-endpoint HOST:29500",
        )
    return "hub" if any(network.is_ours(a) for a in addresses) else "member"


def _addresses(host: str) -> list[str]:
    found = network.resolve(host)
    if not found:
        raise StartError(
            "AR038",
            f"host name {host} does not resolve on this host",
            why="neither /etc/hosts nor the name server knows it",
            fix="give its IP address, or add it to /etc/hosts on this host (getent hosts NAME shows what is known)",
        )
    return found


def check_port(options: Options) -> None:
    """Raises StartError AR037 if the port given for one node is taken."""
    if options.port is not None and not network.port_is_free(options.port):
        raise port_taken(options.port)


def port_taken(port: int) -> StartError:
    """The error for a port that somebody else listens on: who, and a free one."""
    holder = network.holder_of(port)
    who = (
        f"process {holder.pid} listens on it: {holder.command}" if holder else "another process listens on it"
    )
    return StartError(
        "AR037",
        f"port {port} is in use on this host",
        why=f"{who}; often a job that was not ended" if holder else who,
        fix=f"--master-port {network.free_port()}"
        + (f", or kill {holder.pid} if it is yours" if holder else ""),
    )


def check_loopback(options: Options) -> str:
    """A sentence if the meeting point's name leads other nodes to themselves; "" if not."""
    addresses = network.resolve(options.host)
    if not addresses or not all(network.is_loopback(a) for a in addresses):
        return ""
    return (
        f"{options.host} resolves to {addresses[0]} on this host, which means the host itself on every node"
    )
