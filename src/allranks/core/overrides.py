"""Which settings does the command line give in place of the script's own (`allranks run --set`, `allranks tune`)?

One variable, ALLRANKS_SET, carries them to every rank as JSON. The library asks here where a script may give such a setting. No torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from allranks.core.errors import StartError

T = TypeVar("T")

VARIABLE = "ALLRANKS_SET"
TRIAL = "ALLRANKS_TRIAL"
"""A folder: this is a trial of `allranks tune`, which resumes nothing and writes there what it finds in effect."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting that can be given from outside."""

    kind: Literal["count", "number", "switch", "choice"]
    where: str
    """Who takes it: the launcher, or this call of the script."""
    least: int = 0
    choices: tuple[str, ...] = ()
    changes: str = ""
    """What it changes in the training; "" where only the order of sums may differ, or nothing."""


SETTINGS: dict[str, Setting] = {
    "threads": Setting("count", "the launcher", 1),
    "bind_cores": Setting("switch", "the launcher"),
    "micro_batch_size": Setting("count", "allranks.start", 1),
    "accumulation_steps": Setting("count", "allranks.start", 1),
    "precision": Setting(
        "choice",
        "allranks.start",
        choices=("fp32", "bf16", "fp16"),
        changes="products are rounded more or less",
    ),
    "num_workers": Setting("count", "run.loader"),
    "prefetch_factor": Setting("count", "run.loader", 1),
    "bucket_cap_mb": Setting("number", "run.model"),
    "compress": Setting(
        "choice",
        "run.model",
        choices=("none", "bf16", "fp16", "int8", "powersgd", "auto"),
        changes="gradients are rounded on their way",
    ),
    "sync_every": Setting(
        "count", "run.model", 1, changes="ranks train apart, and take the mean of their weights now and then"
    ),
    "channels_last": Setting("switch", "run.model"),
    "compile": Setting("switch", "run.model"),
}


def read_settings(given: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """The settings of `--set NAME=VALUE ...`, over those that the environment has already.

    Raises:
        StartError: AR043 no such setting, or a value that it cannot have.
    """
    try:
        found = dict(json.loads(env.get(VARIABLE) or "{}"))
    except (ValueError, TypeError):
        raise StartError(
            "AR043",
            f"{VARIABLE}={env[VARIABLE]!r} is no JSON object",
            fix="use allranks run --set NAME=VALUE",
        ) from None
    pairs = [part.partition("=") for part in given]
    found |= {name.strip().replace("-", "_"): value.strip() for name, _, value in pairs}
    return {name: parse_setting(name, value) for name, value in found.items()}


def parse_setting(name: str, value: Any) -> Any:
    """The value of a setting, from its text or as it is.

    Raises:
        StartError: AR043.
    """
    setting = SETTINGS.get(name)
    if setting is None:
        raise StartError(
            "AR043", f"--set {name}: there is no such setting", fix=f"one of {', '.join(SETTINGS)}"
        )
    text = str(value).lower()
    if setting.kind == "choice" and text in setting.choices:
        return text
    if setting.kind == "switch" and text in ("true", "false", "1", "0", "yes", "no"):
        return text in ("true", "1", "yes")
    if setting.kind == "count" and text.isdigit() and int(text) >= setting.least:
        return int(text)
    if setting.kind == "number":
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if 0 < number < float("inf"):
            return number
    raise StartError(
        "AR043", f"--set {name}={value}: not a value of it", fix=f"--set {name}={_example(setting)}"
    )


def words_of(found: Mapping[str, Any]) -> str:
    """What the launcher says of the settings in effect."""
    pairs = ", ".join(f"{name}={value}" for name, value in found.items())
    changes = [f"{name}: {text}" for name in found if (text := SETTINGS[name].changes)]
    own = any(SETTINGS[name].where != "the launcher" for name in found)
    only = "; those of the library reach only scripts that use allranks" if own else ""
    return f"--set {pairs} in place of the script's own{only}" + "".join(f" ({text})" for text in changes)


def _example(setting: Setting) -> str:
    if setting.kind == "choice":
        return "|".join(setting.choices)
    if setting.kind == "switch":
        return "true or false"
    return f"N, a whole number, at least {setting.least}" if setting.kind == "count" else "a number above 0"


def overridden(name: str, given: T) -> T:
    """What is in effect: the value from outside where there is one, else `given`."""
    value = _forced().get(name, given)
    note(name, value)
    return value


def is_overridden(name: str) -> bool:
    """Whether the value comes from outside."""
    return name in _forced()


def trial_folder() -> Path | None:
    """Where a trial writes; None in ordinary runs."""
    folder = os.environ.get(TRIAL)
    return Path(folder) if folder else None


def _forced() -> dict[str, Any]:
    text = os.environ.get(VARIABLE)
    return dict(json.loads(text)) if text else {}


def note(name: str, value: Any) -> None:
    """In a trial: rank 0 says what is in effect, so that the search knows where it begins."""
    folder = trial_folder()
    if folder is not None and os.environ.get("RANK", "0") == "0":
        with (folder / "in-effect.jsonl").open("a") as file:
            file.write(json.dumps({name: value}, default=str) + "\n")
