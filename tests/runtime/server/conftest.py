"""Servers that tests ask: real ones, on a free port of this machine, each in a thread."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "pydantic", "llguidance", "httpx", "openai")):
    collect_ignore_glob = ["*"]
else:
    import httpx
    from support.serving import Served, serving

Serve = Callable[..., "Served"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with an artifact and settings; all are stopped at the end."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(serving(*args, **options))


@pytest.fixture(scope="module")
def talker(endless: Path) -> Iterator["Served"]:
    """Says abab… to everyone, four at a time."""
    with serving(endless, slots=4, queue=4) as served:
        yield served
