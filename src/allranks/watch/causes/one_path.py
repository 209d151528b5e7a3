"""AR739 one-path: several ranks of a host write the same file at the same moment."""

from __future__ import annotations

from allranks.watch.case import Case
from allranks.watch.noted import Note, notes, place, say, who
from allranks.watch.verdict import Verdict

CODE, NAME = "AR739", "one-path"
TOGETHER_S = 1.0


def find(case: Case) -> Verdict | None:
    """torch.save of one path, after the same step and the same collectives, within a second, by ranks of one host."""
    found: dict[tuple[str, str, int, int], list[tuple[int, Note]]] = {}
    for rank in case.evidence.ranks:
        for note in notes(rank, "saved"):
            key = rank.host, str(note["path"]), int(note.get("step", -1)), int(note.get("issued", -1))
            found.setdefault(key, []).append((rank.rank, note))
    for (host, path, step, _), writers in found.items():
        times = [float(n.get("unix_s", 0.0)) for _, n in writers]
        ranks = sorted({r for r, _ in writers})
        if path.startswith("/dev/") or len(ranks) < 2 or max(times) - min(times) > TOGETHER_S:
            continue
        return say(
            case,
            CODE,
            NAME,
            f"{who(case, ranks)} write the same file at once: {path}",
            ranks,
            where=[place(n) for _, n in writers],
            facts=[
                f"{len(ranks)} ranks of {host} called torch.save within {max(times) - min(times):.1f} s, after the same collectives",
                "each writes over what the other has written: the file may be a mixture that cannot be read",
            ],
            fix="if dist.get_rank() == 0: torch.save(...)\nor a name with the rank in it; allranks' run.save writes each checkpoint once",
            step=max(step, 0) or None,
        )
    return None
