"""Is it seen that a replica averages its gradients, whichever of its forwards are looked at?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from allranks.record import gradients, origin, probe_training, states


class Replicated:
    """What the record asks of a DistributedDataParallel."""

    require_backward_grad_sync = False


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, states.Replica]]:
    for module, name in ((gradients, "watch"), (gradients, "prepare"), (origin, "remember")):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(states, "expect_gradients", lambda *_: None)
    yield states.replicas
    states.replicas.clear()
    probe_training._light.model = 0


def test_syncs_when_the_first_forward_is_not_averaged_then_looked_at_until_one_is(
    seen: dict[int, states.Replica],
) -> None:
    ddp = Replicated()
    for _ in range(3):
        probe_training._look(ddp, (), None, 0, 0)
        assert probe_training._light.model != id(ddp)  # so that the next forward is looked at, too
    ddp.require_backward_grad_sync = True
    probe_training._look(ddp, (), None, 0, 0)
    assert probe_training._light.model == id(ddp) and seen[id(ddp)].syncs == 1
