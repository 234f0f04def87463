"""What a reader's browser sees, in Chromium: each page, light and dark, on a screen and on a phone.

    python -m pytest tests/browser -m browser

Needs Chromium on the path and the packages playwright and axe-playwright-python.
KVBOOK_SCREENSHOTS=folder saves a picture of each page opened.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import build_html, specimen

pytestmark = pytest.mark.browser

SIZES = {"screen": (1280, 800), "phone": (360, 740)}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
THEME = "document.documentElement.dataset.theme"
FITS = "document.documentElement.scrollWidth <= window.innerWidth"
INVERTED = """[...document.querySelectorAll(".cell_output img")].map(
    image => getComputedStyle(image).filter.includes("invert"))"""
OPEN_ALL = """() => {
    document.querySelectorAll("details").forEach(details => { details.open = true });
    const ends = document.getAnimations().map(animation => animation.finished);
    return Promise.all(ends).then(() => true);
}"""
# Off by default in axe: a label that contradicts the text that is shown.
AXE_OPTIONS = {"rules": {"label-content-name-mismatch": {"enabled": True}}}
FONTS_READY = "document.fonts.ready.then(() => true)"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on the path")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="session", params=["book", "specimen", "offered"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built HTML: of the book, of the specimen, and with launch buttons."""
    if request.param == "book":
        return build_html.build().parent
    folder = tmp_path_factory.mktemp("html") / request.param
    specimen.write(folder)
    if request.param == "offered":
        specimen.set_repository(folder)
    return build_html.build(folder).parent


def save_screenshot(page: Any, name: str) -> None:
    folder = os.environ.get("KVBOOK_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def axe_violations(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options=AXE_OPTIONS).response["violations"]
    return [f"{v['id']}: {node['html'][:200]}" for v in found for node in v["nodes"]]


def faults_of(page: Any, path: Path, mode: str, name: str) -> list[str]:
    """Open the page, save its picture, open its answers and hidden code, and tell what is wrong."""
    told: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: told.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.evaluate(FONTS_READY)
    save_screenshot(page, name)
    page.evaluate(OPEN_ALL)
    faults = [line for line in told if line.startswith(("error", "warning"))]
    faults += [f"asks for {url}" for url in asked if not url.startswith(("file:", "data:"))]
    faults += [f"axe {violation}" for violation in axe_violations(page)]
    if page.evaluate(THEME) != mode:
        faults.append(f"is shown in {page.evaluate(THEME)} mode")
    if not page.evaluate(FITS):
        faults.append("scrolls sideways")
    math = page.locator(".math").count()
    rendered = page.locator(".math > .katex, .math > .katex-display").count()
    if rendered != math or page.locator(".katex-error").count():
        faults.append(f"KaTeX set {rendered} of {math} formulas, or with an error")
    inverted = page.evaluate(INVERTED)
    if inverted != [mode == "dark"] * len(inverted):
        faults.append(f"figures inverted: {inverted}")
    return faults


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_each_page_is_clean(browser: Any, site: Path, size: str, mode: str) -> None:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=mode, reduced_motion="reduce"
    )
    faults = []
    for path in [*sorted(site.glob("book/*.html")), site / "search.html"]:
        page = context.new_page()
        name = f"{site.parent.parent.name}-{path.stem}-{size}-{mode}"
        faults += [f"{path.name}: {fault}" for fault in faults_of(page, path, mode, name)]
        page.close()
    context.close()
    assert faults == []


def test_the_color_mode_button_changes_the_theme(browser: Any, site: Path) -> None:
    page = browser.new_page(color_scheme="light")
    page.goto((site / "book" / "intro.html").as_uri())
    seen = set()
    for _ in range(3):
        page.locator(".theme-switch-button").first.click()
        seen.add(page.evaluate(THEME))
    page.close()
    assert seen == {"light", "dark"}


def test_search_works_without_a_server(browser: Any, site: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto((site / "book" / "intro.html").as_uri())
    page.locator(".search-button-field").first.click()
    page.locator("#pst-search-dialog input[type=search]").fill("cache")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=cache*")
    page.wait_for_selector("#search-results li a")
    save_screenshot(page, f"{site.parent.parent.name}-results")
    links = page.locator("#search-results li a").count()
    page.close()
    assert links > 0


def test_hidden_code_opens(browser: Any, site: Path) -> None:
    for path in sorted(site.glob("book/*.html")):
        page = browser.new_page()
        page.goto(path.as_uri())
        for toggle in page.locator("details.hide > summary").all():
            toggle.click()
        closed = page.locator("details.hide:not([open])").count()
        page.close()
        assert closed == 0, path.name
