"""Which address, interface and port? Small questions about this host's network, asked of the kernel, not of a name server
where it can be avoided."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that listens on a port."""

    pid: int
    command: str


def resolve(host: str) -> list[str]:
    """The addresses of a host name, IPv4 first; [] if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return sorted(addresses, key=lambda a: ":" in a)


def is_loopback(address: str) -> bool:
    """Whether an address can be reached from this host only."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_ours(address: str) -> bool:
    """Whether an address belongs to this host: the kernel lets us bind it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def interface_of(address: str) -> str:
    """The network interface that has this address; "" if none has."""
    plain = address.partition("%")[0]
    if ":" in plain:
        return _interface_of_v6(plain)
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asker:
        for _, name in _interfaces():
            if _address_of(asker, name) == plain:
                return name
    return "lo" if is_loopback(plain) else ""


def _interfaces() -> list[tuple[int, str]]:
    try:
        return socket.if_nameindex()
    except OSError:
        return []


def _address_of(asker: socket.socket, name: str) -> str:
    try:
        import fcntl

        raw = fcntl.ioctl(asker.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except (ImportError, OSError):
        return ""
    return socket.inet_ntoa(raw[20:24])


def _interface_of_v6(address: str) -> str:
    wanted = ipaddress.ip_address(address).packed.hex()
    try:
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return ""
    return next((row.split()[5] for row in rows if row.split()[0] == wanted), "")


def source_address(target: str) -> str:
    """This host's address on the way to `target`; "" without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel takes outgoing ones where that is possible.

    An outgoing connection made between this answer and the bind cannot take it then.
    """
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = 0
    for _ in range(50 if low > 21000 else 0):
        port = random.randrange(20000, low)
        if port_is_free(port):
            return port
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    """Whether a server could listen on it on every address."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
        return True


def holder_of(port: int) -> Holder | None:
    """Who listens on a port of this host; None if it cannot be told (another user's process, or no /proc)."""
    inodes = _listening_inodes(port)
    for entry in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            if any(_socket_inode(fd) in inodes for fd in (entry / "fd").iterdir()):
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                return Holder(int(entry.name), command[:120])
    return None


def _socket_inode(fd: Path) -> str:
    try:
        target = str(fd.readlink())
    except OSError:
        return ""
    return target[8:-1] if target.startswith("socket:[") else ""


def _listening_inodes(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            parts = row.split()
            if parts[3] == "0A" and int(parts[1].rpartition(":")[2], 16) == port:
                found.add(parts[9])
    return found - {"0"}
