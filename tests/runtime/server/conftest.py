"""Servers that tests ask, and a browser for the page.

Servers are real ones, on a free port of this machine, each in a thread.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "pydantic", "llguidance", "httpx", "openai")):
    collect_ignore_glob = ["*"]
else:
    from support.serving import Served, serving, slowed

Serve = Callable[..., "Served"]

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


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with an artifact and settings; all are stopped at the end."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(serving(*args, **options))


@pytest.fixture(scope="module")
def talker(endless: Path) -> Iterator["Served"]:
    """Says abab… to everyone, four at a time, for ten seconds or more."""
    with serving(endless, slots=4, queue=4, changed=slowed(0.002)) as served:
        yield served
