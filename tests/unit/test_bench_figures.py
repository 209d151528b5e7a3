"""Are figures of a benchmark right: blocks, uncertainty, rounds, efficiency, and what is shown of them?"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from allranks.bench import stable, telling
from allranks.bench.rounds import Answer, doublings, measure, settings_of
from allranks.bench.trial import Measured, Setting


def ends(step_s: float, count: int, every: Callable[[int], float] = lambda _: 0.0) -> list[float]:
    """Moments at which steps ended."""
    moments = [0.0]
    for number in range(count):
        moments.append(moments[-1] + step_s + every(number))
    return moments


def test_figure_when_steps_are_short_then_blocks_of_many() -> None:
    found = stable.figure(ends(0.001, 2001))
    assert found is not None and found.step_s == pytest.approx(0.001) and found.is_stable
    assert 15 <= found.blocks <= 20


def test_figure_when_a_few_blocks_are_disturbed_then_median_stays() -> None:
    found = stable.figure(ends(0.05, 100, lambda n: 1.0 if n % 20 == 7 else 0.0))
    assert found is not None and found.step_s == pytest.approx(0.05, rel=0.01) and found.is_stable


def test_figure_when_steps_differ_much_or_are_few_then_not_stable() -> None:
    uneven = stable.figure(ends(0.05, 40, lambda n: 0.1 * (n // 2 % 2)))
    few = stable.figure(ends(0.2, 3))
    assert uneven is not None and not uneven.is_stable
    assert few is not None and math.isinf(few.sure) and not few.is_stable
    assert stable.figure([1.0]) is None


def measured(setting: Setting, step_s: float, samples: float | None) -> Measured:
    return Measured(setting, (step_s,) * 8, samples, rss_mb=100.0 * setting.ranks, exchange_s=step_s / 4)


def answer(samples: float | None = 32.0, failing: Setting | None = None) -> tuple[Answer, list[str]]:
    said: list[str] = []
    tries: dict[Setting, int] = {}

    def try_once(setting: Setting) -> Measured:
        tries[setting] = tries.get(setting, 0) + 1
        if setting == failing:
            return Measured(setting, failure="ended with exit code 1\nRuntimeError: out of luck")
        step_s = (0.1 if setting.ranks == 1 else 0.125) * (1.1 if tries[setting] == 2 else 1.0)
        return measured(setting, step_s, samples and samples * setting.ranks)

    settings = settings_of([1, 2], ["script", "ddp"])
    return measure(settings, 3, try_once, said.append), said


def test_measure_when_two_ranks_take_longer_steps_then_efficiency_says_so() -> None:
    found, said = answer()
    by_name = {str(row.setting): row for row in found.rows}
    assert list(by_name) == ["1 rank, script", "2 ranks, script", "2 ranks, ddp"] and len(said) == 9
    two = by_name["2 ranks, script"]
    assert two.per_s == pytest.approx(64 / 0.125) and two.efficiency == pytest.approx(0.8)
    assert two.rounds == 3 and two.apart == pytest.approx(0.1)
    text = telling.as_text(found, "train.py")
    assert "80%" in text and "25%" in text and "512" in text


def test_measure_when_a_setting_fails_then_it_costs_one_trial_and_is_told() -> None:
    found, said = answer(failing=Setting(2, "ddp"))
    assert sum("out of luck" in line or "exit code 1" in line for line in said) == 1
    text = telling.as_text(found, "train.py")
    assert "2 ranks, ddp: no figure" in text and "RuntimeError: out of luck" in text
    assert next(r for r in found.rows if r.setting == Setting(2)).efficiency == pytest.approx(0.8)


def test_measure_when_no_loader_was_seen_then_steps_and_no_efficiency() -> None:
    found, _ = answer(samples=None)
    assert found.unit == "steps" and all(row.efficiency is None for row in found.rows)
    assert "No loader was seen" in telling.as_text(found, "train.py")


def test_json_and_drawing_when_made_then_whole_and_readable() -> None:
    found, _ = answer(failing=Setting(2, "ddp"))
    told = json.loads(json.dumps(telling.as_json(found, "train.py", ("--lr", "1"))))
    assert told["format"] == "allranks-bench/1" and len(told["rows"]) == 3
    drawn = ElementTree.fromstring(telling.as_svg(found, "a <b> & c.py"))
    assert any("a <b> & c.py" in (each.text or "") for each in drawn.iter())


def test_settings_when_one_rank_then_only_the_script_itself() -> None:
    assert settings_of([1], ["script", "bf16"]) == [Setting(1)]
    assert settings_of([2], ["bf16", "dataparallel"]) == [Setting(2, "bf16"), Setting(1, "dataparallel")]
    assert doublings(6) == [1, 2, 4, 6] and doublings(1) == [1] and doublings(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "there is no file"),
        (["--ranks", "0,2", __file__], "is not a list"),
        (["--strategies", "zip", __file__], "known are script"),
        (["--strategies", "dataparallel", __file__], "2 GPUs or more"),
        (["--plot", "a.png", __file__], "not an .svg"),
    ],
)
def test_command_when_asked_for_what_cannot_be_then_says_so(arguments: list[str], words: str) -> None:
    from allranks.cli.app import make_app

    environment = {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    result = CliRunner().invoke(make_app(["bench"]), ["bench", *arguments], env=environment)
    assert result.exit_code == 2 and words in result.output
