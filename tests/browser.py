"""Chromium, for tests that look at pages as people do."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def _program() -> str:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        reason = f"none of {', '.join(_NAMES)} is installed, which shows pages"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextlib.contextmanager
def chromium() -> Iterator[Callable[..., Any]]:
    """Gives ``look(see, **options)``, which returns ``see(page)`` of a fresh page.

    It waits in a thread of its own: Playwright keeps an event loop running in its own,
    where no test could run another.
    """
    from playwright.sync_api import sync_playwright

    program = _program()
    with ThreadPoolExecutor(1) as thread:

        def start() -> tuple[Any, Any]:
            driver = sync_playwright().start()
            options = ["--no-sandbox", "--disable-dev-shm-usage"]
            return driver, driver.chromium.launch(executable_path=program, args=options)

        driver, browser = thread.submit(start).result()

        def look(see: Callable[[Any], Any], **options: Any) -> Any:
            def run() -> Any:
                with browser.new_context(**options) as context:
                    return see(context.new_page())

            return thread.submit(run).result()

        yield look
        thread.submit(browser.close).result()
        thread.submit(driver.stop).result()


# Of every element with text of its own that is to be seen: it, its ink, what is below.
_COLOURS = """() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const over = (below, top) => below.map((b, i) => top[3] * top[i] + (1 - top[3]) * b);
  const says = n => [...n.childNodes].some(c => c.nodeType === 3 && c.data.trim());
  const all = [...document.querySelectorAll("body *")];
  return all.filter(n => n.checkVisibility() && !n.disabled && says(n)).map(node => {
    const layers = [];
    for (let n = node; n; n = n.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(n).backgroundColor);
      layers.push([r, g, b, a]);
    }
    const ground = layers.reduceRight(over, [255, 255, 255]);
    const ink = numbers(getComputedStyle(node).color).slice(0, 3);
    return [node.textContent, ink.map(c => c / 255), ground.map(c => c / 255)];
  });
}"""


def _luminance(colour: list[float]) -> float:
    """Of a colour in [0, 1], as WCAG 2 has it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrasts(page: Any) -> list[tuple[str, float]]:
    """The texts that are to be seen, and the contrast of each, from 1 to 21."""
    found = []
    for text, ink, ground in page.evaluate(_COLOURS):
        dark, light = sorted([_luminance(ink), _luminance(ground)])
        found.append((text, (light + 0.05) / (dark + 0.05)))
    return found
