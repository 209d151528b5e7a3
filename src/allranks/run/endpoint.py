"""What is the host and the port in what the user wrote?"""

from __future__ import annotations

from allranks.core.errors import StartError


def split_endpoint(text: str, default: int | None = None) -> tuple[str, int | None]:
    """Host and port of 'h', 'h:29500', '[fe80::1]:29500', 'fe80::1'."""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.lstrip(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if port and not port.isdigit():
        raise StartError("AR032", f"port {port!r} in {text!r} is not a number", fix=f"{host}:29500")
    return host, int(port) if port else default


def check_port(port: int) -> None:
    """Raises StartError AR032 for what can be no port."""
    if not 0 < port < 65536:
        raise StartError(
            "AR032",
            f"port {port} is out of range",
            why="ports are numbers from 1 to 65535",
            fix="--master-port 29500",
        )
