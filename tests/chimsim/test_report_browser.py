"""The report in a real Chromium: no request and no error, controls that work, a phone's width, labels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chimsim import sweep
from chimsim.report_html import write_report
from tests.chimsim.small import small_keys, small_trace
from traces import write_trace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = "<img src=x onerror=document.title='hit'><b>b</b>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    trace = small_trace()
    workflows = [
        replace(
            workflow,
            workflow_id=HOSTILE + workflow.workflow_id,
            runs={
                model: replace(run, stages=tuple(replace(stage, name=HOSTILE + stage.name) for stage in run.stages))
                for model, run in workflow.runs.items()
            },
        )
        for workflow in trace.workflows
    ]
    path = folder / "<img src=x onerror=document.title='hit'>.jsonl"
    write_trace(replace(trace, workflows=tuple(workflows)), path)
    keys = small_keys(str(path)) | {"combo": ["qwen1.5b+7b", "qwen1.5b+7bx2"]}
    results = sweep(**keys, out=folder / "out")
    relation = {"claim": HOSTILE, "says": HOSTILE, "verdict": "holds", "blocks": [{"block": HOSTILE, "value": 1.0}]}
    experiment = {"title": f"Small {HOSTILE}", "relations": [relation], "command": f"echo {HOSTILE}"}
    (folder / "out" / "experiment.json").write_text(json.dumps(experiment))
    write_report(results, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@contextmanager
def opened(browser: Browser, report: Path, width: int = 1280, height: int = 900, **options: Any) -> Iterator[Page]:
    """The report in a window of its own. Whatever goes wrong in it is an error at the end."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if not local(request.url) else None)
    page.goto(report.as_uri())
    page.wait_for_selector("#cdf .main-svg")
    yield page
    context.close()
    assert wrong == []


@pytest.fixture(scope="module")
def shared(browser: Browser, report: Path) -> Iterator[Page]:
    """For tests that choose nothing."""
    with opened(browser, report) as page:
        yield page


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as page:
        yield page


def local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:"))


def names(page: Page, figure: str) -> list[str]:
    found: list[str] = page.evaluate(f"document.querySelector('#{figure} .plot').data.map(trace => trace.name)")
    return found


def values(page: Page, figure: str, axis: str = "x") -> Any:
    return page.evaluate(f"document.querySelector('#{figure} .plot').data[0].{axis}")


def test_names_from_the_trace_stay_text(shared: Page) -> None:
    assert shared.title() == f"Small {HOSTILE}"
    assert shared.locator("h1").inner_text() == f"Small {HOSTILE}"
    assert shared.locator("img").count() == 0
    assert shared.locator("main b").count() == 0
    assert shared.locator(".workflow h3").first.inner_text().startswith(HOSTILE)
    assert shared.locator("#command").inner_text() == f"echo {HOSTILE}"


def test_a_policy_deselected_leaves_the_figures_and_comes_back(page: Page) -> None:
    assert names(page, "frontier") == ["fcfs", "chimera", "not dominated"]
    assert names(page, "cdf") == ["fcfs", "chimera tau 1"]
    assert len(values(page, "queue")) == 2
    page.locator("label.chip", has_text="chimera").click()
    assert names(page, "frontier") == ["fcfs", "not dominated"]
    assert names(page, "cdf") == ["fcfs"]
    assert len(values(page, "queue")) == 1
    page.locator("label.chip", has_text="fcfs").click()
    assert page.locator("#frontier .none").is_visible()
    page.locator("label.chip", has_text="chimera").click()
    assert names(page, "frontier") == ["chimera", "not dominated"]


def test_another_combination_and_latency_move_the_points(page: Page) -> None:
    before = {figure: values(page, figure) for figure in ("frontier", "queue", "cdf", "load")}
    slowest = page.locator(".workflows").inner_text()
    page.get_by_label("Combination").select_option(label="qwen1.5b+7bx2")
    for figure, found in before.items():
        assert values(page, figure) != found or values(page, figure, "y") != found
    assert page.locator(".workflows").inner_text() != slowest
    assert len(names(page, "load")) == 6
    mean = values(page, "frontier")
    page.get_by_text("p99", exact=True).click()
    assert all(p99 > value for p99, value in zip(values(page, "frontier"), mean, strict=True))
    page.locator("#load-title ~ label select").select_option(label="fcfs")
    assert "under fcfs" in (page.locator("#load .plot").get_attribute("aria-label") or "")
    assert "under fcfs" in page.locator("#slowest figcaption").inner_text()


def test_hovering_over_a_point_shows_its_configuration(shared: Page) -> None:
    at = shared.evaluate(
        """() => {
          const plot = document.querySelector("#frontier .plot"), { xaxis, yaxis } = plot._fullLayout;
          plot.scrollIntoView({ block: "center" });
          const box = plot.getBoundingClientRect(), last = plot.data[1].x.length - 1;
          return [box.x + xaxis._offset + xaxis.d2p(plot.data[1].x[last]),
                  box.y + yaxis._offset + yaxis.d2p(plot.data[1].y[last])];
        }"""
    )
    shared.mouse.move(at[0] - 3, at[1])
    shared.mouse.move(*at)
    shared.wait_for_selector("#frontier .hoverlayer text")
    text = shared.locator("#frontier .hoverlayer").inner_html().replace("&nbsp;", " ")
    for word in ("chimera tau inf", "combo qwen1.5b+7b", "rps 20", "slots 4", "Seeds 0, 1", "Chimera(tau=inf", "±"):
        assert word in text
    assert "<img" not in text


def test_every_figure_is_labelled_and_has_its_data(shared: Page) -> None:
    assert shared.locator("html").get_attribute("lang") == "en"
    for figure in ("frontier", "queue", "cdf", "load"):
        plot = shared.locator(f"#{figure} .plot")
        assert plot.get_attribute("role") == "img"
        assert len(plot.get_attribute("aria-label") or "") > 60
        assert shared.locator(f"#{figure} figcaption").inner_text()
        assert shared.locator(f"#{figure} details table").count() == 1
    buttons = "[...document.querySelectorAll('#frontier .modebar-btn')].map(b => b.dataset.title)"
    assert len(shared.evaluate(buttons)) == 4  # none of Plotly's that would send the data away
    unlabelled = shared.locator(".plot:not([aria-label]), .track:not([aria-label]), svg.main-svg:not(.plot *)")
    assert unlabelled.count() == 0
    assert shared.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => h.tagName)")[:2] == ["H1", "H2"]
    shared.locator("#frontier summary").click()
    with shared.expect_download() as waited:
        shared.locator("#frontier").get_by_role("button", name="Download CSV").click()
    lines = Path(waited.value.path()).read_text().splitlines()
    assert lines[0].startswith("series,")
    assert len(lines) == 5


def test_the_controls_are_reached_and_used_from_the_keyboard(page: Page) -> None:
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.name || document.activeElement.className"))
        if reached[-1] == "policy":
            break
    assert reached[0] == "skip"
    assert {"combo", "policy"} <= set(reached)
    page.keyboard.press("Space")
    assert names(page, "frontier") == ["chimera", "not dominated"]


def test_it_fits_a_phone(browser: Browser, report: Path) -> None:
    with opened(browser, report, 390, 844, has_touch=True, is_mobile=True) as page:
        page.evaluate("document.querySelectorAll('details').forEach(node => node.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for control in page.locator("#controls select, #controls .chip, #latencies label, button:visible").all():
            box = control.bounding_box()
            assert box is not None
            assert box["height"] >= 43


def test_dark_mode_and_print_change_the_colours(page: Page) -> None:

    def colours() -> tuple[str, str]:
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        line = page.evaluate("document.querySelector('#frontier .plot').data[0].line.color")
        return ground, line

    light = colours()
    assert light[1] == "#000000"
    page.emulate_media(color_scheme="dark")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    dark = colours()
    assert dark[1] != light[1]
    assert dark[0] != light[0]
    page.emulate_media(color_scheme="dark", media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert colours()[1] == "#000000"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#pickers").is_visible()
    assert page.evaluate("document.querySelector('#frontier .plot').clientHeight") > 300
    page.emulate_media(color_scheme="dark", media="screen")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert colours() == dark
