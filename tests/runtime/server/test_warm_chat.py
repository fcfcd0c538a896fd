"""How many files a chat that is answered runs code in: whoever follows one through the code opens these."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from support.paths import ROOT
from support.serving import serving, wait_until
from support.synthetic import random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.schema import Text

MOST = 50
"""Files of `pi_runtime`, compiled kernels apart: they are called as a whole."""
TEMPLATE = b"""{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
PACKAGE = f"{ROOT / 'pi_runtime'}/"


@contextmanager
def traced(found: set[str], wanted: threading.Event) -> Iterator[None]:
    """Note the files of all functions that any thread calls while they are wanted; threads are those begun within."""

    def trace(frame: FrameType, _event: str, _argument: object) -> None:
        if wanted.is_set() and (name := frame.f_code.co_filename).startswith(PACKAGE):
            found.add(name.removeprefix(PACKAGE))

    before = sys.gettrace(), threading.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])  # type: ignore[arg-type]


def test_a_warm_chat_runs_code_in_few_files(tmp_path: Path) -> None:
    text = Text(prefix_ids=(), end_ids=())
    files = {"chat_template.jinja": TEMPLATE}
    path = random_artifact(tmp_path / "random.pi", small_decoder(context_length=192), text=text, files=files)
    body = {"model": "random", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "stream": True}
    with load(path) as model:
        model.warm_up()  # compiling kernels would take long while it is traced
    found, wanted = set[str](), threading.Event()
    with traced(found, wanted), serving(path) as served:
        assert served.post("/v1/chat/completions", body).status_code == 200
        wanted.set()
        said = served.post("/v1/chat/completions", body).text
        wait_until(lambda: served.service.metrics.requests["/v1/chat/completions", 200] == 2)
        wanted.clear()
    assert said.endswith("data: [DONE]\n\n")
    ours = sorted(name for name in found if not name.startswith("kernels/"))
    rooms = Counter(name.partition("/")[0] for name in ours)
    assert {"server", "engine", "execution", "sequence", "text"} <= rooms.keys()
    assert len(ours) <= MOST, (rooms, ours)
