"""The HTML report in a real headless browser: no error, no request, both themes. Skips where there is no browser."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from realgraph.planner.report.format import seconds_text
from realgraph.planner.report.html import page
from tests.plan_reports import everything

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: the system's, or the one that playwright has installed."""
    with sync_api.sync_playwright() as driver:
        found = next((path for name in NAMES if (path := shutil.which(name))), driver.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("no Chromium: install the package chromium-headless-shell, or run `playwright install`")
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_stands_alone_in_a_browser(theme: str, browser: Any, tmp_path: Path) -> None:
    shown = everything()
    file = tmp_path / "plan.html"
    file.write_text(page(shown))
    context = browser.new_context(
        color_scheme=theme, java_script_enabled=False, viewport={"width": 1180, "height": 900}
    )
    tab = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(file.as_uri())
    assert (said, asked) == ([], [file.as_uri()])

    assert tab.get_by_text(seconds_text(shown.plan.period_seconds), exact=True).first.is_visible()
    assert tab.get_by_role("heading", level=2).count() == 9
    for row in shown.rows:
        bars = tab.locator(f'g.bar[data-call="{row.call}"]')
        boxes = [bars.nth(i).bounding_box() for i in range(bars.count())]
        assert len(boxes) >= 2 and all(box and box["width"] > 1 and box["height"] > 10 for box in boxes), row.call
        assert row.call in bars.first.locator("title").text_content()
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    _readable(tab, theme)
    tab.set_viewport_size({"width": 400, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "only pictures scroll sideways"
    context.close()


def _readable(tab: Any, theme: str) -> None:
    """The theme is taken, and text stands out: a contrast of 4.5 or more (WCAG 2.2, 1.4.3)."""
    colours = tab.evaluate(
        "[...['ink', 'soft', 'bad', 'good'], ...['card']].map(name =>"
        " getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim())"
    )
    *texts, card = map(_luminance, colours)
    assert (card > 0.5) == (theme == "light")
    for text in texts:
        assert (max(text, card) + 0.05) / (min(text, card) + 0.05) >= 4.5

    kinds = ["generate", "inference", "train", "reallocate"]
    for colour in tab.evaluate(
        f"{kinds}.map(name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim())"
    ):
        assert 1.05 / (_luminance(colour) + 0.05) >= 4.5, f"white labels on {colour}"


def _luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, 0 to 1 (WCAG 2.2)."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
