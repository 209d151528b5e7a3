"""How is a search told: lines while it goes on, a table at its end, JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from allranks.core.overrides import SETTINGS
from allranks.tune.knobs import Knob
from allranks.tune.search import MIN_GAIN, Found, Measured, Worth
from allranks.tune.trial import Script

FORMAT = "allranks-tune/1"


def settings_text(settings: dict[str, Any]) -> str:
    """'num_workers=4 threads=1'; 'as it is' for none."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "as it is"


def trial_line(measured: Measured, best: Measured | None) -> str:
    """One trial as it is done."""
    name = settings_text(measured.settings)
    if measured.failure:
        return f"{name}: failed ({measured.failure.splitlines()[0]})"
    ratio = f", x {measured.rate / best.rate:.2f}" if best is not None and best.rate else ""
    short = ", left early" if measured.is_cut_short else ""
    return f"{name}: {measured.rate:.4g} updates/s{ratio}{short}"


def command_line(script: Script, settings: dict[str, Any]) -> str:
    """The command with what was found."""
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    return shlex.join(
        ["allranks", "run", "--nproc", str(script.nproc), *given, *script.launch, script.path, *script.args]
    )


def left_line(left: Sequence[Knob]) -> str:
    """What was not turned, since it changes the training; "" for nothing."""
    told = ", ".join(f"{knob.name} ({knob.changes})" for knob in left)
    return f"not tried without --allow-changes: {told}" if told else ""


def report(script: Script, found: Found, seconds: float, left: Sequence[Knob] = ()) -> str:
    """The end of a search, for people."""
    start, best = found.start, found.best
    if best.failure:
        hint = f"\n{left_line(left)}" if left else ""
        return f"the script as it is could not be measured:\n{start.failure}{hint}"
    lines = [*_headline(found, seconds), *map(_worth, found.kept)]
    if found.did_not_pay:
        lines += ["", "what does not:"]
        lines += [f"  {name:18} {_value(value):>8}    x {ratio:.2f}" for name, value, ratio in _once(found)]
    for failure, names in _by_failure(found).items():
        lines += ["", f"failed: {'; '.join(names)}", *(f"  | {line}" for line in failure.splitlines())]
    if not found.is_complete:
        lines += ["", "the time was up before every setting had its turn: --minutes gives more"]
    if left:
        lines += ["", left_line(left)]
    if found.kept:
        lines += ["", "use it:", f"  {command_line(script, best.settings)}", *_in_code(best.settings)]
    return "\n".join(lines)


def _headline(found: Found, seconds: float) -> list[str]:
    start, best = found.start, found.best
    took = f"{found.trials} trials in {seconds / 60:.1f} minutes"
    if not found.kept:
        sure = f"more than {100 * MIN_GAIN:.0f} % quicker than {_rate(start)} as it is"
        return [f"nothing found that is {sure}; {took}"]
    pays = ["", "what pays, each by what is lost without it:"]
    if start.failure:
        lines = ["as it is it does not run:", *(f"  | {line}" for line in start.failure.splitlines())]
        return [*lines, "", f"{_rate(best)} with what was found; {took}", *pays]
    return [f"x {found.gain:.2f}: {_rate(best)}, {_rate(start)} as it is; {took}", *pays]


def _worth(worth: Worth) -> str:
    gain = f"x {worth.gain:.2f}" if worth.gain is not None else "not measured alone"
    note = f"; changes the training: {worth.changes}" if worth.changes else ""
    return f"  {worth.name:18} {_value(worth.before):>8} -> {_value(worth.value):8} {gain}{note}"


def as_json(script: Script, found: Found, seconds: float, left: Sequence[Knob] = ()) -> dict[str, Any]:
    """The end of a search, as data; rates in updates per second."""
    return {
        "format": FORMAT,
        "script": script.path,
        "args": list(script.args),
        "nproc": script.nproc,
        "seconds": round(seconds, 1),
        "trials": found.trials,
        "is_complete": found.is_complete,
        "start": {"rate": found.start.rate, "spread": found.start.spread, "failure": found.start.failure},
        "best": {"rate": found.best.rate, "spread": found.best.spread, "settings": found.best.settings},
        "gain": found.gain,
        "kept": [
            {"name": w.name, "value": w.value, "before": w.before, "gain": w.gain, "changes": w.changes}
            for w in found.kept
        ],
        "did_not_pay": [{"name": n, "value": v, "ratio": r} for n, v, r in _once(found)],
        "not_tried": [{"name": knob.name, "changes": knob.changes} for knob in left],
        "failed": [{"settings": m.settings, "failure": m.failure} for m in found.failed],
        "command": command_line(script, found.best.settings),
    }


def _once(found: Found) -> list[tuple[str, Any, float]]:
    """The best try of each setting that did not pay."""
    best: dict[str, tuple[str, Any, float]] = {}
    kept = {worth.name for worth in found.kept}
    for name, value, ratio in found.did_not_pay:
        if name not in kept and (name not in best or ratio > best[name][2]):
            best[name] = (name, value, ratio)
    return list(best.values())


def _by_failure(found: Found) -> dict[str, list[str]]:
    """What failed, those that failed in the same way together."""
    out: dict[str, list[str]] = {}
    for measured in found.failed:
        out.setdefault(measured.failure, []).append(settings_text(measured.settings))
    return out


def _in_code(settings: dict[str, Any]) -> list[str]:
    """The same in the script, where it uses allranks."""
    by_call: dict[str, list[str]] = {}
    for name, value in settings.items():
        by_call.setdefault(SETTINGS[name].where, []).append(f"{name}={value!r}")
    lines = [
        f"  {call}(..., {', '.join(given)})" for call, given in by_call.items() if call != "the launcher"
    ]
    return ["or in the script:", *lines] if lines else []


def _rate(measured: Measured) -> str:
    return f"{measured.rate:.4g} updates/s (+- {100 * measured.spread:.1f} %)"


def _value(value: Any) -> str:
    return "auto" if value is None else str(value)
