"""AR815 slow-link: what the ranks exchange waits for the link of one host."""

from __future__ import annotations

from allranks.perf.hosts import MANY_RESENT, OFTEN, slow_link
from allranks.perf.values import ms
from allranks.perf.view import Cause, View

CODE, NAME = "AR815", "slow-link"
MIN_SHARE, MIN_S = 0.2, 0.001


def find(view: View) -> Cause | None:
    """Where exchanging takes a good part of the step, and one host's connections lose or hold back more than the others'."""
    if len(view.history.nodes) < 2 or len(view.ranks) < 2:
        return None
    cost = min(r.per_step("exchange") + r.per_step("collective") for r in view.ranks)
    if cost < max(MIN_S, MIN_SHARE * view.step_s):
        return None
    since, until = min(r.since for r in view.ranks), max(r.until for r in view.ranks)
    link = slow_link(view.history, since, until)
    if link is None:
        return None
    if link.resent >= MANY_RESENT:
        shown = f"sends {link.resent:.1%} of its segments once more: they get lost"
    elif link.held_back < OFTEN:
        shown = "is an end of all connections that hold data back"
    else:
        shown = f"holds {link.queued / 1e3:.0f} kB back in {link.held_back:.0%} of the looks: it sends as fast as it can"
    ranks = tuple(r.rank for r in view.history.ranks if r.node == link.node)
    size = view.replica(view.ranks[0].rank).get("parameter_bytes", 0)
    return Cause(
        CODE,
        NAME,
        f"exchanging takes {ms(cost)} of each {ms(view.step_s)} step, and the link of {link.host} is the slow one: it {shown}",
        f"look at the network of {link.host} (ethtool, ip -s link, another interface by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME), or "
        "leave it out; less to send: larger batches, accumulation, bf16_compress_hook, run.model(compress=...)",
        ranks,
        cost,
        cost / view.step_s,
        (f"{size / 1e6:.1f} MB of gradients: {size / 1e6 / cost:.0f} MB a second",) if size else (),
    )
