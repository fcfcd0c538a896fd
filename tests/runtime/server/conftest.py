"""A browser for the tests of the chat page."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
WAIT = 15000
"""Milliseconds for what must come: much, where other processes test beside."""
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


# While a browser runs, asyncio takes the thread's loop for a running one: so it ends with the file that needs it.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium; the test is skipped where there is none, or no playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if path is None:
        pytest.skip("no chromium here")
    playwright.expect.set_options(timeout=WAIT)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()
