"""The examples for frameworks that speak through OpenAI's clients, each where its package is installed."""

import re
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest
from support.documents import DOCS
from support.serving import Served, serving
from support.synthetic import random_artifact, small_decoder

from pi_runtime.artifact.schema import Text

TEMPLATE = """{% if tools %}{{ tools | tojson }} <tool_call>{"name":, "arguments":}</tool_call>{% endif %}\
{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that says anything at all, with a template for tools; it asks for a key."""
    path = tmp_path_factory.mktemp("frameworks") / "model.pi"
    decoder, text = small_decoder(context_length=4096), Text(prefix_ids=(), end_ids=())
    files = {"chat_template.jinja": TEMPLATE.encode()}
    with serving(random_artifact(path, decoder, scale=3.0, text=text, files=files), api_keys=("k",)) as served:
        yield served


def example(name: str) -> ModuleType:
    found = spec_from_file_location(name, DOCS / "examples" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module: Any = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_langchain(talker: Served, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("langchain_openai")
    example("langchain_client").main(talker.url, "k")
    out = capsys.readouterr().out
    assert "continent=" in out
    assert re.search(r"^multiply\(\{'a': -?\d+, 'b': -?\d+\}\) = -?\d+$", out, re.MULTILINE)


def test_llama_index(talker: Served, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_index")
    example("llama_index_client").main(talker.url, "k")
    assert len(capsys.readouterr().out) > 100
