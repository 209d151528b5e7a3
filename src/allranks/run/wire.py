"""How do agents talk? JSON, one object a line, over TCP sockets that never block.

A link knows when it last heard something; who waits decides what silence means. A torch store is not used: its look-ups block for
good on a dead network whatever their timeout says (docs/design/launcher.md).
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections import deque
from typing import Any, Protocol

VERSION = 1
LIMIT_BYTES = 16 << 20
Message = dict[str, Any]
BUSY_FACTOR = 5
# A beat goes out every 250 ms: without an acknowledgement for so long, four of them were lost. Offsets: struct tcp_info, linux/tcp.h.
ACK_MS = 1000


class Link(Protocol):
    """One end of a connection between an agent and the hub."""

    heard_at: float
    """time.monotonic() when the other end was last heard."""
    closed: str
    """Why it is closed; "" while it is open."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks, says nothing if the link is closed."""
        ...

    def receive(self) -> list[Message]:
        """The messages that have come, in order; also moves what waits to be sent."""
        ...

    def close(self, why: str = "closed") -> None: ...


class LocalLink:
    """A link within one process; `pair` makes its two ends."""

    def __init__(self) -> None:
        self.heard_at, self.closed = time.monotonic(), ""
        self._inbox: deque[Message] = deque()
        self._other: LocalLink = self

    @classmethod
    def pair(cls) -> tuple[LocalLink, LocalLink]:
        a, b = cls(), cls()
        a._other, b._other = b, a
        return a, b

    def send(self, message: Message) -> None:
        self._other._inbox.append(message)

    def receive(self) -> list[Message]:
        self.heard_at = time.monotonic()
        taken = list(self._inbox)
        self._inbox.clear()
        return taken

    def close(self, why: str = "closed") -> None:
        self.closed = self.closed or why


class SocketLink:
    """A link over a connected TCP socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.heard_at, self.closed = time.monotonic(), ""
        self._in, self._out = bytearray(), bytearray()
        self._kept: list[Message] = []

    def fileno(self) -> int:
        """For a selector; -1 when closed."""
        return self.socket.fileno()

    @property
    def is_writing(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out) and not self.closed

    def local_address(self) -> str:
        """This host's address as the other end sees it."""
        return _plain(self.socket.getsockname()[0]) if not self.closed else ""

    def peer_address(self) -> str:
        try:
            return _plain(self.socket.getpeername()[0])
        except OSError:
            return ""

    def is_acknowledged(self) -> bool:
        """Whether the other kernel takes what we send; False where this cannot be known."""
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
            unacked, last_ack_ms = (int.from_bytes(info[at : at + 4], sys.byteorder) for at in (24, 56))
        except (OSError, AttributeError):  # no TCP_INFO outside Linux
            return False
        return unacked == 0 or last_ack_ms < ACK_MS

    def send(self, message: Message) -> None:
        if self.closed:
            return
        self._out += json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"
        if len(self._out) > LIMIT_BYTES:
            self.close("the other end does not read")
            return
        self._flush()

    def receive(self) -> list[Message]:
        self._flush()
        while not self.closed and self._read():
            pass
        *lines, rest = bytes(self._in).split(b"\n")
        self._in = bytearray(rest)
        if len(self._in) > LIMIT_BYTES:
            self.close("not an allranks agent: a line without end")
        kept, self._kept = self._kept, []
        return kept + [message for line in lines if (message := self._parse(line)) is not None]

    def put_back(self, messages: list[Message]) -> None:
        """Have `receive` give these again."""
        self._kept = messages + self._kept

    def close(self, why: str = "closed") -> None:
        if not self.closed:
            self.closed = why
            self.socket.close()

    def _parse(self, line: bytes) -> Message | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if isinstance(message, dict) and isinstance(message.get("kind"), str):
            return message
        self.close("not an allranks agent: a line that is not JSON")
        return None

    def _read(self) -> bool:
        """Whether more may be waiting."""
        try:
            data = self.socket.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close(error.strerror or "connection lost")
            return False
        if not data:
            self.close("connection closed by the other end")
            return False
        self.heard_at = time.monotonic()
        self._in += data
        return len(self._in) <= LIMIT_BYTES

    def _flush(self) -> None:
        while self._out and not self.closed:
            try:
                sent = self.socket.send(self._out)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                while not self.closed and self._read():
                    pass  # what the other end said before it went
                self.close(error.strerror or "connection lost")
                return
            del self._out[:sent]


def silence(link: Link, now: float, limit_s: float) -> str:
    """Why a link that has said nothing is lost; "" while there is hope.

    A machine that is only overloaded may keep an agent from running for seconds, while its kernel goes on acknowledging what we
    send: then the limit is several times as long. A cut cable or a dead machine acknowledges nothing.
    """
    silent = now - link.heard_at
    if silent <= limit_s or (
        silent <= BUSY_FACTOR * limit_s and isinstance(link, SocketLink) and link.is_acknowledged()
    ):
        return ""
    return f"silent for {silent:.1f} s"


def _plain(address: str) -> str:
    """10.0.0.1 from ::ffff:10.0.0.1."""
    return address.removeprefix("::ffff:") if "." in address else address


def listen(port: int) -> socket.socket:
    """A socket that listens on every address of this host, IPv4 and IPv6 where there is both.

    Raises:
        OSError: The port is taken.
    """
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            server = socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512
            )
            server.setblocking(False)
            return server
    server = socket.create_server(("", port), backlog=512)
    server.setblocking(False)
    return server
