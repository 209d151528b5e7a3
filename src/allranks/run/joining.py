"""How does a node get to the place where the nodes meet, and what does it say while nobody answers there?"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from allranks.core.errors import StartError
from allranks.run import network, preflight
from allranks.run.hub import JOIN_TIMEOUT_S, SAY_EVERY_S, SAY_FIRST_S
from allranks.run.options import Options
from allranks.run.roster import Hello
from allranks.run.wire import SocketLink

TRY_EVERY_S = 0.3
TRY_FOR_S = 1.0
LOOPBACK_GRACE_S = 4.0
HELLO_S = 5.0


@dataclass(slots=True)
class Trouble:
    """The last attempt to connect, in words."""

    text: str = "not tried yet"
    is_silent: bool = False


def join(
    options: Options, hello: Hello, say: Callable[[str], None], interrupted: Callable[[], int]
) -> SocketLink:
    """Connect to the hub and say hello; every 10 s say what is wrong.

    Args:
        options: host and port of the hub, and the time limit (join_timeout).
        hello: What this node says of itself.
        say: Prints a line.
        interrupted: The number of an ending signal that has come, or 0; asked between attempts.

    Raises:
        StartError: AR314 the name means this host itself, AR315 something else answers there, AR316 refused until the end of the time,
            AR317 silence until the end of the time, AR038 the name does not resolve.
        InterruptedError: A signal came; its number is the first argument.
    """
    assert options.port is not None
    limit = float(options.conf.get("join_timeout", options.conf.get("timeout", JOIN_TIMEOUT_S)))
    begun = time.monotonic()
    said = begun - SAY_EVERY_S + SAY_FIRST_S
    trouble = Trouble()
    while True:
        sock = _connect(options.host, options.port, trouble)
        if sock is not None:
            return _greet(SocketLink(sock), hello, options)
        now = time.monotonic()
        number = interrupted()
        if number:
            raise InterruptedError(number)
        loop = preflight.check_loopback(options)
        if loop and now - begun > LOOPBACK_GRACE_S:
            raise StartError(
                "AR314",
                f"node {_number(options)} cannot reach node 0 at {options.host}:{options.port}",
                why=f"{loop}; nobody listens there",
                fix="give the address by which the other nodes see node 0 (hostname -I on it), e.g. --master-addr 10.0.0.1",
            )
        if now - begun > limit:
            raise _gave_up(options, trouble, limit)
        if now - said >= SAY_EVERY_S:
            said = now
            say(
                f"node {_number(options)} = {hello.host} is here; waiting for node 0 at {options.host}:{options.port}: "
                f"{trouble.text}; {now - begun:.0f} s so far"
            )
        time.sleep(TRY_EVERY_S)


def _number(options: Options) -> str:
    return str(options.node_rank) if options.node_rank is not None else "(not numbered)"


def _connect(host: str, port: int, trouble: Trouble) -> socket.socket | None:
    addresses = network.resolve(host)
    if not addresses:
        trouble.text, trouble.is_silent = f"the name {host} does not resolve here", False
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=TRY_FOR_S)
        except TimeoutError:
            trouble.text, trouble.is_silent = (
                f"{address} does not answer (it is down, or a firewall drops the packets)",
                True,
            )
        except OSError as error:
            trouble.is_silent = False
            if error.errno == errno.ECONNREFUSED:
                trouble.text = f"{address} refuses the connection (no agent listens there yet)"
            else:
                trouble.text = f"{address}: {error.strerror or error}"
    return None


def _greet(link: SocketLink, hello: Hello, options: Options) -> SocketLink:
    """Say hello and wait for an answer that only a hub gives; the answer stays in the link for the agent."""
    link.send({"kind": "hello", **hello.to_json()})
    deadline = time.monotonic() + HELLO_S
    while time.monotonic() < deadline and not link.closed:
        messages = link.receive()
        if messages:
            link.put_back(messages)
            return link
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        link.close(link.closed or "no answer")
    holder = (
        network.holder_of(options.port or 0)
        if any(map(network.is_ours, network.resolve(options.host)))
        else None
    )
    raise StartError(
        "AR315",
        f"what listens at {options.host}:{options.port} is no allranks agent",
        why=f"process {holder.pid}: {holder.command}"
        if holder
        else f"{link.closed}: a torchrun, or another program",
        fix=f"another port on all nodes: --master-port {network.free_port()}",
    )


def _gave_up(options: Options, trouble: Trouble, limit: float) -> StartError:
    code = "AR317" if trouble.is_silent else "AR316"
    return StartError(
        code,
        f"node {_number(options)} could not reach node 0 at {options.host}:{options.port} within {limit:.0f} s",
        why=trouble.text,
        fix="start node 0 there, or give its right address; open the port between the nodes; --rdzv-conf join_timeout=SECONDS",
    )
