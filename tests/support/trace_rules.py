"""Is a file valid by the Trace Event Format? The rules that our events can break; `check(trace)` gives the events.

Source: "Trace Event Format" (Google, 2016), and what ui.perfetto.dev drops in silence: slices that overlap, arrows without a slice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

NEEDS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "i": {"name", "ts", "pid", "s"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rule of the format that our events can break; gives the events."""
    events = json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]
    for event in events:
        assert NEEDS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int) and isinstance(event.get("tid", 0), int)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "M":
            assert event["name"] in METADATA
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
    check_nesting(events)
    check_flows(events)
    return events


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    """(begin, end, name) of each thread's slices."""
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            found[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return found


def check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of one thread are inside or beside each other: viewers drop those that overlap."""
    for thread, found in slices(events).items():
        open_until: list[float] = []
        for begin, end, name in sorted(found, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin + 0.01:  # microseconds are rounded to a thousandth
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.01, (thread, name, begin)
            open_until.append(end)


def check_flows(events: list[dict[str, Any]]) -> None:
    """Each arrow begins once and ends once, not before it began, and both ends are on a slice."""
    ends = defaultdict(list)
    for e in events:
        if e["ph"] in "sf":
            ends[e["cat"], e["name"], e["id"]].append(e)
    found = slices(events)
    for both in ends.values():
        assert sorted(e["ph"] for e in both) == ["f", "s"], both
        start, finish = sorted(both, key=lambda e: e["ph"], reverse=True)
        assert start["ts"] <= finish["ts"] and start["pid"] != finish["pid"]
        for e in both:
            inside = [s for s in found[e["pid"], e["tid"]] if s[0] - 0.01 <= e["ts"] <= s[1] + 0.01]
            assert inside, e
