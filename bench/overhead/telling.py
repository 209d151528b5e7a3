"""What do the measured times say? Tables with ratios within rounds, the goals and whether they are met, and the file of figures."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BEGIN, END = "<!-- compare: begin -->", "<!-- compare: end -->"
Found = dict[str, dict[str, list[tuple[float, float]]]]
PEERS = ("accelerate", "fabric", "trainer")
OF_SOLO = {"cnn": 0.93, "lm": 0.97}


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 2 else (min(values), 0, max(values))
    return f"{statistics.median(values):.3g} ({low:.3g} to {high:.3g})"


def ratios(
    times: dict[str, list[tuple[float, float]]], tool: str, against: str, place: int = 0
) -> list[float]:
    """Tool by `against` in each round; of wall time, or with place=1 of processor time."""
    return [v[place] / a[place] for v, a in zip(times[tool], times[against], strict=True)]


def tables(found: Found, starts: dict[str, list[float]], ranks: int, load: list[float]) -> str:
    """All that was measured, as Markdown."""
    parts: list[str] = []
    for job, times in found.items():
        against = "raw" if "raw" in times else next(iter(times))
        rows = [
            f"**{job}**, {ranks} ranks, {len(next(iter(times.values())))} rounds, median (quartiles):\n",
            f"| library | ms per step | x {against} | processor ms per step | x {against} |",
            "|---|---|---|---|---|",
        ]
        for tool in times:
            wall, busy = ([t[place] for t in times[tool]] for place in (0, 1))
            columns = [spread(wall), spread(ratios(times, tool, against))]
            columns += [f"{statistics.median(busy):.3g}", spread(ratios(times, tool, against, 1))]
            rows.append(f"| {tool} | {' | '.join(columns)} |")
        parts.append("\n".join(rows))
    if starts:
        rows = [
            "**From the command to the end of the first step** (tiny), seconds:\n",
            "| | s |",
            "|---|---|",
        ]
        names = {"raw": "torchrun, hand-written loop", "allranks": "allranks run, allranks"}
        rows += [f"| {names[tool]} | {spread(values)} |" for tool, values in starts.items()]
        parts.append("\n".join(rows))
    parts.append("\n".join(["Goals:\n", *goals(found, starts)]))
    parts.append(
        f"Load average of the machine meanwhile: {min(load):.1f} to {max(load):.1f} (this comparison itself makes about {ranks})."
    )
    return "\n\n".join(parts)


def goals(found: Found, starts: dict[str, list[float]]) -> list[str]:
    """Each goal that these figures can judge, met or not."""
    lines: list[str] = []

    def judge(what: str, values: list[float], most: float) -> None:
        middle = statistics.median(values)
        lines.append(
            f"- {'met' if middle <= most else 'NOT met'}: {what}: {spread(values)}, at most {most:.3g}"
        )

    for job, times in found.items():
        if "allranks" not in times:
            continue
        if "raw" in times:
            judge(f"{job}, allranks / raw", ratios(times, "allranks", "raw"), 1.0)
        peers = [p for p in PEERS if p in times]
        if job == "tiny" and peers:
            best = min(peers, key=lambda p: statistics.median(v[0] for v in times[p]))
            judge(f"{job}, allranks / best peer ({best})", ratios(times, "allranks", best), 0.25)
        if job in OF_SOLO and "solo" in times:
            judge(f"{job}, allranks / solo", ratios(times, "allranks", "solo"), 1 / OF_SOLO[job])
    if starts.get("raw") and starts.get("allranks"):
        pairs = zip(starts["allranks"], starts["raw"], strict=True)
        judge("time to the first step, allranks run / torchrun", [a / b for a, b in pairs], 1.1)
    return lines


def versions(python: str) -> dict[str, str]:
    """Of what was compared, in the environment that has it."""
    code = (
        "import importlib.metadata as m, json, platform\n"
        "names = [n for n in ('torch', 'numpy', 'accelerate', 'lightning', 'allranks') "
        "if any(m.distributions(name=n))]\n"
        "print(json.dumps({n: m.version(n) for n in names} | {'python': platform.python_version()}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def machine() -> str:
    """Cores, processor, kernel."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {model}, Linux {platform.release()}"


def keep(
    found: Found, starts: dict[str, list[float]], ranks: int, load: list[float], peers_python: str
) -> Path:
    """Write what was measured, where, and how busy the machine was."""
    folder = ROOT / "bench" / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"overhead-{time.strftime('%Y%m%d-%H%M%S')}.json"
    story = {
        "command": "python bench/overhead/compare.py " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "versions": versions(sys.executable),
        "peers": versions(peers_python),
        "load_average": [round(x, 1) for x in load],
        "ranks": ranks,
        "first_step_s": {tool: [round(v, 3) for v in values] for tool, values in starts.items()},
        "ms_per_step_wall_and_processor": {
            job: {tool: [[round(x, 4) for x in pair] for pair in pairs] for tool, pairs in times.items()}
            for job, times in found.items()
        },
    }
    path.write_text(json.dumps(story) + "\n")
    return path


def write_docs(text: str, path: Path) -> None:
    """Put the tables between their marks in docs/speed.md."""
    page = ROOT / "docs" / "speed.md"
    old = page.read_text()
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    story = json.loads(path.read_text())
    theirs = ", ".join(f"{k} {v}" for k, v in story["peers"].items())
    head = f"`{story['command']}`, {story['machine']}; {theirs}; {time.strftime('%Y-%m-%d')}; figures in `bench/results/{path.name}`."
    page.write_text(f"{before}{BEGIN}\n{head}\n\n{text}\n{END}{after}")
