"""Does the page of a report work in a real browser: drawn, silent, alone, narrow, by keyboard, whatever was logged?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.report.making import make
from allranks.report.page import as_page
from support.browser import Browser, find_browser
from support.histories import Doing
from support.needs import need
from support.run_directories import BEGAN, NAN_VERDICT, add_event, make_run

pytestmark = pytest.mark.e2e

EVIL = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&</title>"
# Elements that are wider than the window and do not scroll within themselves.
OVERFLOWING = """[...document.body.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
    && e.getClientRects().length && !e.closest('.scroll, pre, .skip')).map(e => e.tagName + '.' + e.getAttribute('class'))"""
MARKS = """Object.fromEntries([...document.querySelectorAll('figure')].map(
    f => [f.id, f.querySelectorAll('.plot :is(.curve, .part, .cell)').length]))"""
OUTSIDE_ITS_PLOT = """[...document.querySelectorAll('.plot svg *')].filter(e => {
    if (e.closest('defs') || e.getAttribute('visibility') === 'hidden') return false;
    const box = e.getBoundingClientRect(), plot = e.closest('svg').getBoundingClientRect();
    return box.width > 0 && (box.left < plot.left - 2 || box.right > plot.right + 2 || box.bottom > plot.bottom + 2);
}).map(e => e.closest('figure').id + ' ' + e.tagName + ' ' + e.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need("needs a browser: apt-get install chromium", find_browser() is not None)
    with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def rich_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight ranks on two hosts, one late; a NaN; every kind of plot; evil names everywhere."""
    folder = tmp_path_factory.mktemp("rich")
    metrics = [
        {
            "step": s,
            "time": BEGAN + s,
            "loss": "nan" if s == 80 else 2.0 / s,
            "val_loss": 2.5 / s,
            EVIL: s,
            "lr": 0.1,
        }
        for s in range(1, 120)
    ]
    ranks = [Doing(log=0.3, copy=0.2) for _ in range(8)]
    ranks[5] = Doing(data=14.0)
    about = {"command": [f"/home/{EVIL}.py", EVIL], "argv": ["run", EVIL], "cwd": EVIL}
    run = make_run(
        folder / "run",
        ranks,
        nodes=2,
        clock_ahead_s=50.0,
        about=about,
        metrics=metrics,
        verdicts=[NAN_VERDICT],
    )
    add_event(run, 11, "verdict", code="AR201", text=f"AR201 {EVIL}\n{EVIL}")
    add_event(run, 12, "checkpoint", step=50, folder=EVIL)
    page = folder / "page.html"
    page.write_text(as_page(make(run, BEGAN + 60)), encoding="utf-8")
    return page


def test_page_source_then_asks_no_network_and_runs_only_its_own_script(rich_page: Path) -> None:
    text = rich_page.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy and policy.group(1).startswith("default-src &#x27;none&#x27;; style-src &#x27;sha256-")
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.]+", text))
    assert addresses <= {"http://www.w3.org"}  # the name of SVG, which is not fetched
    assert "<script>document.title" not in text and text.count("<script") == 2


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, True)])
def test_page_when_opened_then_is_drawn_silent_and_fits(
    browser: Browser, rich_page: Path, width: int, dark: bool
) -> None:
    page = browser.open(rich_page, width=width, dark=dark)
    assert page.complaints == []
    assert page.requests == [rich_page.as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate(OUTSIDE_ITS_PLOT) == []
    marks = page.evaluate(MARKS)
    assert {"loss", "throughput", "stack", "heat", "steps", "metric-0", "metric-1"} <= marks.keys()
    assert all(marks.values()), marks
    assert page.evaluate("document.querySelectorAll('#loss .plot .curve').length") == 2
    assert page.evaluate("document.querySelectorAll('#loss .plot .cross').length") == 1  # the NaN
    assert page.evaluate("document.querySelectorAll('figure').length") == page.evaluate(
        "document.querySelectorAll('figure details table tbody tr:first-child').length"
    )
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == ("rgb(16, 21, 28)" if dark else "rgb(246, 247, 249)")


def test_page_when_names_are_markup_then_they_stay_text(browser: Browser, rich_page: Path) -> None:
    page = browser.open(rich_page, width=1280)
    assert page.evaluate("document.title") != "taken"
    assert page.evaluate("document.querySelectorAll('img, main script, iframe').length") == 0
    assert EVIL in page.evaluate("document.querySelector('#metrics').textContent")
    assert EVIL in page.evaluate("document.querySelector('#about').textContent")
    assert page.evaluate("document.querySelector('#known').textContent").count(EVIL) == 2


def test_page_when_used_by_keyboard_then_says_values_and_shows_the_chosen_step(
    browser: Browser, rich_page: Path
) -> None:
    page = browser.open(rich_page, width=1280)
    page.evaluate("document.querySelector('#stack .plot').focus()")
    page.key("ArrowRight")
    assert "rank 0 node0: data wait" in page.evaluate("document.querySelector('#stack .says').textContent")
    for _ in range(5):
        page.key("ArrowDown")
    assert "rank 5 node1: data wait 1" in page.evaluate("document.querySelector('#stack .says').textContent")
    page.evaluate("document.querySelector('#loss .plot').focus()")
    page.key("ArrowRight")
    assert (
        page.evaluate("document.querySelector('#loss .says').textContent") == "step 1: loss 2, val_loss 2.5"
    )
    chosen = "document.querySelector('#steps select').selectedIndex"
    page.evaluate("document.querySelector('#heat .plot').focus()")
    page.key("ArrowRight")
    page.key("Enter")
    first = page.evaluate(chosen)
    for _ in range(60):
        page.key("ArrowRight")
    page.key("Enter")
    assert page.evaluate(chosen) > first
    assert "Rank 5 came last" in page.evaluate("document.querySelector('#steps .note').textContent")
    assert page.evaluate("document.querySelectorAll('#steps tbody tr').length") >= 8 * 5
    page.evaluate("document.querySelector('#loss button.log').click()")
    assert page.evaluate("document.querySelector('#loss button.log').getAttribute('aria-pressed')") == "true"
    page.evaluate("document.querySelector('#theme').click()")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.complaints == []


@pytest.mark.parametrize("kind", ["nothing", "one-rank", "only-metrics", "only-nan", "one-step"])
def test_page_when_much_is_missing_then_it_is_drawn_and_says_so(
    browser: Browser, tmp_path: Path, kind: str
) -> None:
    ranks = [Doing()] if kind == "one-rank" else [Doing(), Doing()]
    metrics = {"only-metrics": [{"step": 1, "loss": 1.0}], "only-nan": [{"step": 1, "loss": "nan"}]}.get(
        kind, []
    )
    has_timeline = kind in ("one-rank", "one-step")
    run = make_run(
        tmp_path / "run",
        ranks,
        steps=1 if kind == "one-step" else 100,
        has_timeline=has_timeline,
        metrics=metrics,
    )
    file = tmp_path / "page.html"
    file.write_text(as_page(make(run, BEGAN + 60)), encoding="utf-8")
    page = browser.open(file, width=400)
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate(OUTSIDE_ITS_PLOT) == []
    assert "What this report cannot say" in page.evaluate("document.querySelector('#known').textContent")
    links = page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href').slice(1))")
    assert links and all(page.evaluate(f"!!document.getElementById({json.dumps(id)})") for id in links)
