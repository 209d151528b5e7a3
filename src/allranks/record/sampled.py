"""Where does the thread that trains stand, again and again? Asked for by a word of the page, answered by the tick thread (ticking.py).

To ask costs the rank nothing while nobody does, and whoever asks does not wait: the lines are in the page when they are wanted.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from time import monotonic_ns

from allranks.record import layout as at
from allranks.record.parsing import Words
from allranks.record.values import Phase


def ask(path: str | os.PathLike[str], for_s: float) -> None:
    """From now on and for so long the process notes where it stands; asked again before the time is up, it goes on.

    Raises:
        OSError: The page is gone or may not be written.
    """
    with Path(path).open("r+b", buffering=0) as file:
        file.seek(8 * at.W_SAMPLE_UNTIL_NS)
        file.write(struct.pack("q", monotonic_ns() + int(for_s * 1e9)))


def read(path: str | os.PathLike[str]) -> list[tuple[Phase, str]]:
    """What it did and the user's line, at each of the last looks since it was asked; torn ones are left out.

    Raises:
        NotARecord: As `page.read_page`.
        OSError: The file is gone or may not be read.
    """
    found = Words(Path(path).read_bytes())
    num_sampled = min(found.words[at.W_NUM_SAMPLED], at.NUM_SAMPLED)
    words = found.words[at.SAMPLED : at.SAMPLED + num_sampled]
    return [(Phase(word & 0xFF), line) for word in words if (line := found.string(word >> 8))]
