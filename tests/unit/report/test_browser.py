"""The report in a headless Chromium: charts, hover, zoom, keys, a phone, and nothing on the console."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.browser import CHROMIUM, Browser
from support.written_run import write_run_folder

from lockstep.report.page import write_report

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
PLOT = "document.querySelector('.plot')"
OUTPUT = "document.querySelector('.chart output')"

# Luminance and contrast as in WCAG 2.2.
LEAST_CONTRAST = """(() => {
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const weights = [0.2126, 0.7152, 0.0722], numbers = color => color.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const bright = color => numbers(color).reduce((sum, v, i) => sum + weights[i] * linear(v), 0);
  const ground = element => { const color = getComputedStyle(element).backgroundColor;
    return color.endsWith(', 0)') ? ground(element.parentElement) : color; };
  const contrast = element => {
    const [low, high] = [getComputedStyle(element)['PROPERTY'], ground(element)].map(bright).sort((a, b) => a - b);
    return [(high + 0.05) / (low + 0.05), element.outerHTML.slice(0, 80)]; };
  const shown = [...document.querySelectorAll('PARTS')].filter(part => part.getBoundingClientRect().height);
  return shown.map(contrast).sort((a, b) => a[0] - b[0])[0];
})()"""

PARTS = [  # selector, property, least contrast
    ("h1, h2, h3, p, dt, dd, th, td, li, summary, small, footer, button", "color", 4.5),
    (".line, .dots, .mark", "stroke", 3),
    (".band, rect", "fill", 3),
]
OVERLAPS = """(() => {
  const parts = [...document.querySelectorAll('h2, h3, figcaption p, .legend li, button, dt, dd, .plot')];
  const boxes = parts.map(part => [part, part.getBoundingClientRect()]);
  const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return boxes.flatMap(([one, a], i) => boxes.slice(i + 1)
    .filter(([other, b]) => meets(a, b)).map(([other]) => one.outerHTML.slice(0, 60) + other.outerHTML.slice(0, 60)));
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run_folder(folder / "first", 400),
        write_run_folder(folder / "second", 300, seed="5"),
    ]
    write_report(runs, folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (1440, True), (375, False)])
def test_every_chart_is_visible_and_nothing_overflows(
    browser: Browser, page: Path, width: int, dark: bool
) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.evaluate(
        "[...document.querySelectorAll('.chart, .timeline, .bar')].every(f => f.getBoundingClientRect().height > 20)"
    )
    assert browser.evaluate("document.querySelectorAll('.chart').length") == 9
    assert browser.evaluate("document.documentElement.scrollWidth") == width, (
        "the page scrolls sideways"
    )
    assert browser.evaluate(
        "[...document.querySelectorAll('.chart .line, .band')].every(p => p.getBoundingClientRect().width > 100)"
    )
    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(246, 248, 250)")
    assert browser.problems == []


def test_the_mouse_reads_values_and_zooms_all_charts(browser: Browser, page: Path) -> None:
    browser.open(page)
    box = browser.evaluate(
        f"(({{x, y, width, height}}) => [x, y, width, height])({PLOT}.getBoundingClientRect())"
    )
    at = [(box[0] + box[2] * share, box[1] + box[3] / 2) for share in (0.25, 0.5)]
    browser.mouse("mouseMoved", *at[1])
    tip = browser.evaluate(f"{OUTPUT}.hidden ? '' : {OUTPUT}.textContent")
    assert (
        tip.startswith("step 20")
        and "first: training" in tip
        and "generation 2 after step 200: a/0: exited" in tip
    )
    before = browser.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(s => s.getAttribute('viewBox'))"
    )
    browser.mouse("mouseMoved", *at[0])
    browser.mouse("mousePressed", *at[0])
    browser.mouse("mouseMoved", *at[1])
    browser.mouse("mouseReleased", *at[1])
    low, high = map(int, browser.evaluate("document.documentElement.dataset.range").split())
    assert 95 <= low <= 105 and 195 <= high <= 205
    after = browser.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(s => s.getAttribute('viewBox'))"
    )
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert browser.evaluate(
        "[...document.querySelectorAll('.chart .x li')].every(l => +l.dataset.v >= 99 && +l.dataset.v <= 206)"
    )
    browser.evaluate("document.querySelector('button[aria-label=\"show all steps\"]').click()")
    assert (
        browser.evaluate(
            "[...document.querySelectorAll('.chart svg')].map(s => s.getAttribute('viewBox'))"
        )[0]
        == "0 0 1000 300"
    )
    assert browser.problems == []


def test_the_axis_of_step_times_is_cut_also_when_zoomed(browser: Browser, page: Path) -> None:
    browser.open(page)
    top = "(charts[1].data.most = MOST, zoom(100, 200), +charts[1].ys.lastChild.dataset.v)"
    assert browser.evaluate(top.replace("MOST", "0.3")) == 0.55, "all are above"
    browser.evaluate("charts[1].data.lines[0].y[150] = 9")
    assert browser.evaluate(top.replace("MOST", "1")) == 1
    assert browser.evaluate(top.replace("MOST", "null")) == 8


def test_keys_read_values_and_zoom(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate(f"{PLOT}.focus()")
    browser.key("ArrowRight")
    first = browser.evaluate(f"{OUTPUT}.textContent")
    browser.key("ArrowRight")
    assert first.startswith("step 9") and browser.evaluate(f"{OUTPUT}.textContent").startswith(
        "step 17"
    )
    browser.key("+", text="+")
    assert browser.evaluate("document.documentElement.dataset.range") == "101 300"
    assert browser.evaluate("document.querySelector('.zoom').textContent") == "steps 101 to 300+−↺"
    browser.key("Escape")
    assert browser.evaluate("document.documentElement.dataset.range") == "1 400"
    assert browser.problems == []


@pytest.mark.parametrize("width", [375, 500, 768, 1440])
def test_no_text_or_button_overlaps_another(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    assert browser.evaluate(OVERLAPS) == []


def test_a_click_shows_the_command_that_explains_the_step(browser: Browser, tmp_path: Path) -> None:
    run = write_run_folder(tmp_path / "a 'run'", 400)
    write_report([run], tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    command = f"{PLOT}.parentElement.querySelector('code').textContent"
    assert browser.evaluate(command) == ""
    x, y, width, height = browser.evaluate(
        f"(({{x, y, width, height}}) => [x, y, width, height])({PLOT}.getBoundingClientRect())"
    )
    middle = x + width * 199 / 399, y + height / 2
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        browser.mouse(kind, *middle)
    words = ["lockstep", "why", str(run), "--step", "200"]
    assert shlex.split(browser.evaluate(command)) == words
    browser.mouse("mouseMoved", x, y - 200)
    assert shlex.split(browser.evaluate(command)) == words, "it stays when the pointer leaves"
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('.chart code')).userSelect")
        == "all"
    )
    browser.evaluate(f"{PLOT}.focus()")
    browser.key("ArrowRight")
    browser.key("Enter")
    assert shlex.split(browser.evaluate(command))[-1] == "208"
    assert browser.problems == []


def test_a_page_of_two_runs_has_no_command(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate(f"{PLOT}.focus()")
    browser.key("ArrowRight")
    browser.key("Enter")
    assert browser.evaluate("[...document.querySelectorAll('code')].every(c => !c.textContent)")
    assert browser.problems == []


def test_charts_have_names_and_nothing_moves(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.evaluate(
        "[...document.querySelectorAll('svg, .plot[tabindex], button')].every(e => e.getAttribute('aria-label'))"
    )
    assert browser.evaluate(
        "[...document.querySelectorAll('*')].map(e => getComputedStyle(e))"
        ".every(s => s.transitionDuration === '0s' && s.animationName === 'none')"
    ), "prefers-reduced-motion would have to stop it"


def test_the_timeline_names_workers_and_generations(browser: Browser, page: Path) -> None:
    browser.open(page)
    script = "(({x, y, width, height}) => [x + width / 2, y + height / 2])(document.querySelector('.timeline rect').getBoundingClientRect())"
    browser.evaluate("document.querySelector('.timeline').scrollIntoView()")
    browser.mouse("mouseMoved", *browser.evaluate(script))
    tip = browser.evaluate("document.querySelector('.timeline output').textContent")
    assert tip.startswith("a/0: generation 1, 0.00 s to 10 s") and browser.problems == []


def test_texts_and_shapes_have_enough_contrast(browser: Browser, page: Path) -> None:
    for dark in (False, True):
        browser.open(page, dark=dark)
        for selector, name, least in PARTS:
            script = LEAST_CONTRAST.replace("PARTS", selector).replace("PROPERTY", name)
            contrast, element = browser.evaluate(script)
            assert contrast >= least, f"{element}: {contrast:.2f}"
