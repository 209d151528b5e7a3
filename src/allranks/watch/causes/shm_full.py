"""AR208 shared-memory-full: /dev/shm is too small for the batches in flight."""

from __future__ import annotations

import re

from allranks.watch.case import Case
from allranks.watch.evidence import Failure
from allranks.watch.stacks import is_inside
from allranks.watch.verdict import Verdict

CODE, NAME = "AR208", "shared-memory-full"

_FULL = re.compile(
    r"unable to (?:allocate|write to|mmap).{0,60}shared memory|insufficient shared memory|out of shared "
    r"memory|No space left on device[^\n]*/torch_\d+_\d|/torch_\d+_\d[^\n]*No space left|unable to mmap .* bytes from file </torch_",
    re.I | re.S,
)


def find(case: Case) -> Verdict | None:
    for rank in case.roots:
        text = "\n".join((rank.failure.message, *rank.failure.text)) if rank.failure else ""
        # What a worker printed before it died; of another error it tells nothing.
        printed = rank.output if rank.failure and _is_of_loader(rank.failure) else ()
        text = "\n".join((text, *printed))
        if not _FULL.search(text):
            continue
        node = case.node_of(rank)
        line = next((x.strip() for x in text.split("\n") if _FULL.search(x)), "")
        facts = [line[:200]]
        if node and node.shm_size_bytes:
            facts.append(
                f"/dev/shm on {node.host} has {node.shm_size_bytes / 1e6:.0f} "
                f"MB, {(node.shm_free_bytes or 0) / 1e6:.0f} MB of them free now"
            )
        loader = rank.record.loader if rank.record else None
        if loader is not None and loader.num_workers:
            facts.append(
                f"{loader.num_workers} loader workers on each of "
                f"{len(node.ranks) if node else 1} ranks hold batches there, 2 each by default"
            )
        return case.verdict(
            CODE,
            NAME,
            f"{case.who([rank])}: shared memory (/dev/shm) is full: its data loader cannot pass a batch",
            [rank],
            where=case.frames(rank.failure.frames) if rank.failure else None,
            facts=facts,
            fix=(
                "raise /dev/shm (docker --shm-size=8g, Kubernetes emptyDir "
                "medium: Memory), or lower num_workers, prefetch_factor or the batch"
            ),
            can_go_on=False,
        )
    return None


def _is_of_loader(failure: Failure) -> bool:
    return "DataLoader worker" in failure.message or is_inside(failure.frames, "utils/data/dataloader.py")
