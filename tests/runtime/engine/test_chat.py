"""`Model.chat`: answers as text, JSON and calls of tools, and tools of models whose templates know none."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.synthetic import random_artifact, small_decoder

from pi_runtime import Engine, Model, load
from pi_runtime.engine.history import with_tools_as_text
from pi_runtime.errors import PromptError, UsageError
from pi_runtime.text.grammar import Grammar

TEMPLATE = (
    b"{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.thinking %}({{ m.thinking }}){% endif %};"
    b"{% endfor %}a:"
)
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "set", "parameters": OK}}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("chat") / "a.pi"
    decoder = small_decoder(context_length=1024)
    with load(random_artifact(path, decoder, scale=2.0, files={"chat_template.jinja": TEMPLATE})) as found:
        yield found


def test_what_a_model_is(model: Model) -> None:
    assert repr(model).startswith("<Model a.pi: 2 layers, mode auto, context 1024, ")
    for function in (Model.generate, Model.chat, Engine.generate_many):
        assert {"max_tokens", "sampling", "stop"} <= inspect.signature(function).parameters.keys()
    with pytest.raises(TypeError, match="max_token'"):
        model.generate("a", max_token=1)  # type: ignore[call-arg]


def test_a_text_as_it_comes(model: Model) -> None:
    whole = model.chat(HI, max_tokens=9)
    streamed = model.chat(HI, max_tokens=9, stream=True)
    assert streamed.text == ""
    assert "".join(streamed) == whole.text == str(whole) == "".join(model.generate("u:hi;a:", max_tokens=9))
    assert whole.message == {"role": "assistant", "content": whole.text}
    assert (whole.finish_reason, whole.stats.generated_tokens) == ("length", 9)


def test_json_by_a_schema(model: Model) -> None:
    pytest.importorskip("llguidance")
    found = model.chat(HI, schema={**OK, "x-guidance": {"whitespace_flexible": False}})
    assert json.loads(found.text).keys() == {"ok"}
    with pytest.raises(UsageError, match="does not go with a schema"):
        model.chat(HI, schema=OK, grammar=Grammar.regex("a"))


def test_a_tool_of_a_template_that_knows_none(model: Model) -> None:
    pytest.importorskip("llguidance")
    found = model.chat(HI, tools=[TOOL], tool_choice=TOOL)
    (call,) = found.calls
    assert (call.name, json.loads(call.arguments).keys(), found.text.strip()) == ("set", {"ok"}, "")
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    prompt = model.chat_prompt([*HI, found.message, result], tools=[TOOL])
    assert prompt.startswith("s:You may call one or more functions")
    arguments = json.dumps(json.loads(call.arguments))
    written = f'<tool_call>\n{{"name": "set", "arguments": {arguments}}}\n</tool_call>'
    assert prompt.endswith(f";u:hi;a:{written};u:<tool_response>\ndone\n</tool_response>;a:")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": [{}]}, "not a function"),
        ({"tools": [TOOL], "tool_choice": "requird"}, "tool_choice='requird'"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "get"}}}, "one of the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"schema": {"type": "nothing"}}, "schema: type: no type of JSON"),
    ],
)
def test_what_cannot_be(model: Model, settings: Any, message: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(UsageError, match=message):
        model.chat(HI, **settings)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_where_tools_are_told(role: str) -> None:
    first, *more = with_tools_as_text([{"role": role, "content": "Be brief."}, *HI], [TOOL])
    assert first["role"] == role
    assert first["content"].startswith("Be brief.\n\nYou may")
    assert more == HI
    first, *more = with_tools_as_text(HI, [TOOL])
    assert (first["role"], first["content"][:7], more) == ("system", "You may", HI)


@pytest.mark.parametrize("messages", [["hi"], [{"content": "hi"}], [{"role": "assistant", "tool_calls": [1]}]])
def test_what_are_no_messages(model: Model, messages: Any) -> None:
    with pytest.raises(PromptError):
        model.chat_prompt(messages, tools=[TOOL])


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    random_artifact(tmp_path / "model.pi", small_decoder(context_length=2048), files={"chat_template.jinja": TEMPLATE})
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "examples" / "quickstart.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "a notebook is kept without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102
