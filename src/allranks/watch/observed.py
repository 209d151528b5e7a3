"""What was seen of a rank beside its calls: a loss that was not finite, fingerprints of its replicas, loops, connections, locks.

Part of the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

from allranks.watch.verdict import Place


@dataclass(frozen=True, slots=True)
class NotFinite:
    """The first loss of a rank that was nan or infinite when backward was called on it."""

    step: int
    """1 = the first."""
    kind: str = "nan"
    where: Place | None = None
    """The call of backward."""
    made: tuple[Place, ...] = ()
    """Lines that give the loss its value, the newest first."""
    age_s: float = 0.0
    sound: int = -1
    """The last step before it that was looked at and was well; -1 = the one before. Quick steps are not all looked at."""

    @property
    def is_exact(self) -> bool:
        """Whether it is known that no earlier step was not finite."""
        return self.sound in (-1, self.step - 1)


@dataclass(frozen=True, slots=True)
class Check:
    """The fingerprint of the parameters of all replicas after a step."""

    step: int
    seq: int = -1
    """Collectives issued in the default group until then: ranks are compared where both are equal."""
    hash: int = 0
    sums: tuple[int, ...] = ()
    """Of the bits of each parameter, if they were asked for; `Record.checked` names them."""
    changes: tuple[int, ...] = ()
    """How often each was changed in place so far."""
    num_steps: int = 0
    """Optimizer steps that had ended."""


@dataclass(frozen=True, slots=True)
class Loop:
    """The outermost loop of a function around a line at which a rank stands."""

    at: Place
    """Its first line."""
    last: int
    """Number of its last line."""
    line: int
    """Number of the line at which the rank stands."""
    condition: Place | None = None
    """The innermost `if` of the loop around that line."""


@dataclass(frozen=True, slots=True)
class Socket:
    """One TCP connection of a rank that leaves the host."""

    peer: str
    tx_queue: int = 0
    retransmits: int = 0
    own: str = ""  # the address on this side


@dataclass(frozen=True, slots=True)
class FileLock:
    """A lock on a file that a rank waits for or that stands in its way."""

    path: str
    age_s: float = 0.0
    owner_pid: int | None = None
    owner_alive: bool | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """What a name in a line of the user's stood for, on one rank."""

    line: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Caught:
    """An error that came out of a batch, a forward, a backward or a collective, after which the script went on."""

    kinds: tuple[str, ...]
    """Names of its class and those above."""
    message: str
    what: str
    """What raised it, in words."""
    step: int
    """Optimizer steps that had ended."""
    where: Place | None = None
    """The user's line at which it was raised, or that called what raised it."""
    handler: Place | None = None
    """The `except` that took it, as far as the source says."""
    has_met_again: bool = False
    """The rank has called init_process_group since: it began anew with the others."""

    @property
    def identity(self) -> tuple[object, ...]:
        """The same on ranks that all met with it."""
        return self.kinds[:1], self.what, self.step
