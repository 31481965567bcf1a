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
