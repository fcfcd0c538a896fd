"""`/v1/messages` on an engine: turns, events, and every field and block of Anthropic's form, held against its rules."""

import json
from typing import Any

import pytest
from support import asking

from pi_runtime import Engine
from pi_runtime.server.api.served import Served
from pi_runtime.server.errors import ApiError

Chat = tuple[Served, Engine]
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "abc"}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"x": {}}}}
PIECES = [
    "<think>",
    "hm",
    "m</think>",
    "Wait",
    ".",
    '<tool_call>{"name": "add", "argum',
    'ents": {"x": 1}}</tool_call>',
]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 30, "messages": HELLO, **fields}


def rendered(served: Served, **fields: Any) -> str:
    return asking.asked(MESSAGES, body(**fields), served).rendered


def put_together(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make, as the specification tells clients to; their order is checked."""
    message: dict[str, Any] = {}
    arguments, is_open = "", False
    for name, event in events:
        assert name == event["type"]
        match name:
            case "message_start":
                assert not message
                message = event["message"]
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments, is_open = "", True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                assert is_open
                is_open = False
                if message["content"][-1]["type"] == "tool_use" and arguments:
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert events[-1][0] == "message_stop"
    return message


@pytest.mark.parametrize(
    ("fields", "reason", "pieces", "content", "stopped"),
    [
        ({}, "end", ["ab", "c"], [{"type": "text", "text": "abc"}], "end_turn"),
        ({}, "length", ["ab"], [{"type": "text", "text": "ab"}], "max_tokens"),
        ({}, "context", ["ab"], [{"type": "text", "text": "ab"}], "model_context_window_exceeded"),
        ({}, "end", [], [{"type": "text", "text": ""}], "end_turn"),
        (
            {"tools": [TOOL]},
            "end",
            PIECES,
            [
                {"type": "thinking", "thinking": "hmm", "signature": ""},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "name": "add", "input": {"x": 1}},
            ],
            "tool_use",
        ),
        (
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            "end",
            PIECES[:4],
            [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "Wait"}],
            "end_turn",
        ),
        # A call without arguments that a client must be able to read.
        (
            {"tools": [TOOL]},
            "end",
            ['<tool_call>{"name": "add", "arguments": {}}</tool_call>'],
            [{"type": "tool_use", "name": "add", "input": {}}],
            "tool_use",
        ),
    ],
)
def test_a_turn_whole_and_as_events(
    hermes: Chat, fields: dict[str, Any], reason: str, pieces: list[str], content: list[Any], stopped: str
) -> None:
    whole = asking.said(MESSAGES, body(**fields), hermes[0], pieces, reason)
    streamed = put_together(asking.said(MESSAGES, body(**fields, stream=True), hermes[0], pieces, reason))
    for found in (whole, streamed):
        assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "m")
        assert found["stop_reason"] == stopped
        shown = [{k: v for k, v in block.items() if k != "id"} for block in found["content"]]
        assert shown == content
        calls = [block["id"] for block in found["content"] if block["type"] == "tool_use"]
        assert all(calls)
        usage = found["usage"]
        assert (usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 8)
        assert usage["input_tokens"] + 4 == len(asking.asked(MESSAGES, body(**fields), hermes[0]).texts[0])
    assert whole["id"] != streamed["id"]


def test_a_call_that_breaks_off_is_not_to_be_run(hermes: Chat) -> None:
    pieces = ['<tool_call>{"name": "add", "arguments": {"x"']
    whole = asking.said(MESSAGES, body(tools=[TOOL]), hermes[0], pieces, "length")
    assert (whole["stop_reason"], [block["type"] for block in whole["content"]]) == ("max_tokens", ["text"])
    events = asking.said(MESSAGES, body(tools=[TOOL], stream=True), hermes[0], pieces, "length")
    assert dict(events)["message_delta"]["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("stops", "met", "text"),
    [
        (["g"], "g", "def"),
        (["x", "ef", "f"], "ef", "d"),
        (["zz"], None, "defghijklmnopqrstuvwxyz"),
        ([], None, "defghij"),
    ],
)
def test_which_stop_sequence_was_met(alphabet_chat: Chat, stops: list[str], met: str | None, text: str) -> None:
    asked = body(stop_sequences=stops) | ({} if stops else {"max_tokens": 7})
    whole = asking.whole(MESSAGES, asked, alphabet_chat)
    streamed = put_together(asking.streamed(MESSAGES, {**asked, "stream": True}, alphabet_chat))
    for found in (whole, streamed):
        assert found["content"] == [{"type": "text", "text": text}]
        assert found["stop_sequence"] == met
        assert (found["stop_reason"] == "stop_sequence") == (met is not None)


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}}]}


def result(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", **fields}]}


def text_block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;"


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


PLAIN = {"type": "text", "media_type": "text/plain", "data": "Doc."}
WITHIN = {"type": "content", "content": [text_block("In.")]}
HIT = {"title": "T", "source": "s", "content": [text_block("Hit.")], "citations": {"enabled": True}}
REDACTED = {"type": "redacted_thinking", "data": "secret"}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}
SEARCHED = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
READ: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"system": "Be kind."}, ["Be kind."], []),
    ({"system": [text_block("One.", **CACHED), text_block("Two.")]}, ["One.\nTwo."], []),
    ({"system": BILLING + "You are kind."}, ["You are kind."], ["billing", "cch"]),
    ({"system": [text_block(BILLING.replace("a5145", "00000")), text_block("Kind.")]}, ["Kind."], ["billing"]),
    ({"messages": [said(text_block("What"), text_block("is it?", **CACHED))]}, ["What\nis it?"], []),
    ({"messages": [*HELLO, {"role": "system", "content": "Later."}]}, ["Later."], []),
    ({"tools": [{**TOOL, **CACHED, "strict": True, "input_examples": [{"x": 1}], "type": "custom"}]}, ["Adds."], []),
    # The API's own tools are passed over, for nobody here has them.
    ({"tools": [SEARCH, TOOL]}, ["Adds."], ["web_search"]),
    ({"tools": [TOOL], "messages": [*HELLO, CALL, result(content="7 deg")]}, ["add", "7 deg"], []),
    ({"tools": [TOOL], "messages": [*HELLO, CALL, result(content=[text_block("8 deg")])]}, ["8 deg"], []),
    ({"tools": [TOOL], "messages": [*HELLO, CALL, result(is_error=True)]}, ["error"], []),
    ({"tools": [TOOL], "messages": [*HELLO, CALL, result()]}, ["add"], ["error"]),
    ({"messages": [said({"type": "document", "title": "T", "source": PLAIN})]}, ["T\nDoc."], []),
    ({"messages": [said({"type": "document", "source": WITHIN})]}, ["In."], []),
    ({"messages": [said({"type": "search_result", **HIT})]}, ["T\ns\nHit."], []),
    ({"messages": [*HELLO, said(REDACTED, text_block("Said."), role="assistant"), *HELLO]}, ["Said."], ["secret"]),
    ({"messages": [*HELLO, said(SEARCHED, text_block("Said."), role="assistant"), *HELLO]}, ["Said."], ["web_search"]),
]


@pytest.mark.parametrize(("fields", "shown", "hidden"), READ, ids=[str(n) for n in range(len(READ))])
def test_what_the_model_reads(hermes: Chat, fields: dict[str, Any], shown: list[str], hidden: list[str]) -> None:
    text = rendered(hermes[0], **fields)
    assert all(part in text for part in shown), text
    assert not any(part in text for part in hidden), text


def test_results_stand_behind_their_calls(hermes: Chat) -> None:
    mixed = {"role": "user", "content": [text_block("Here."), *result(content="seven")["content"]]}
    text = rendered(hermes[0], tools=[TOOL], messages=[*HELLO, CALL, mixed])
    assert text.index("add", text.index("abc")) < text.index("seven") < text.index("Here.")


def test_the_last_turn_of_the_assistant_goes_on(hermes: Chat) -> None:
    text = rendered(hermes[0], messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}])
    assert text.endswith("The answer is (")


@pytest.mark.parametrize(
    ("fields", "switch"),
    [
        ({}, None),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, True),
        ({"thinking": {"type": "between_tools"}}, True),
        ({"output_config": {"effort": "low"}}, True),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_whether_it_thinks(
    hermes: Chat, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], switch: bool | None
) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(type(hermes[0]), "abilities", type("Able", (), {"switch": True, "efforts": {}})())
    monkeypatch.setattr(
        type(hermes[0].model), "chat_prompt", lambda _self, _messages, **given: found.update(given) or "x"
    )
    asking.asked(MESSAGES, body(**fields), hermes[0])
    assert found["variables"].get("enable_thinking") == switch


CHOICES = [
    ({"type": "auto"}, "Wait.", True),
    ({"type": "auto", "disable_parallel_tool_use": True}, "Wait.", True),
    ({"type": "any"}, "Wait.", False),
    ({"type": "tool", "name": "add"}, "Wait.", False),
    ({"type": "none"}, "Wait.", True),
]


@pytest.mark.parametrize(("choice", "text", "is_free"), CHOICES)
def test_the_choice_of_a_tool(hermes: Chat, choice: dict[str, Any], text: str, is_free: bool) -> None:
    prompt = asking.asked(MESSAGES, body(tools=[TOOL], tool_choice=choice), hermes[0])
    grammar = prompt.settings.get("grammar")
    if not is_free:
        pytest.importorskip("llguidance")
        assert grammar is not None
    assert (choice["type"] == "none") == (not prompt.tools)


NEUTRAL: list[dict[str, Any]] = [
    {"metadata": {"user_id": "u"}},
    {"cache_control": {"type": "ephemeral"}},
    {"service_tier": "auto"},
    {"service_tier": "standard_only"},
    {"speed": "standard"},
    {"container": None},
    {"mcp_servers": []},
    {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    {"temperature": 1},
    {"top_p": 0.9, "top_k": 40},
    {"stream": False, "stop_sequences": None, "tools": None, "tool_choice": None, "system": None, "thinking": None},
    {"model": None},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
def test_what_asks_for_nothing_is_taken(hermes: Chat, fields: dict[str, Any]) -> None:
    prompt, usual = (asking.asked(MESSAGES, body(**more), hermes[0]) for more in (fields, {}))
    assert (prompt.texts, prompt.rendered) == (usual.texts, usual.rendered)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
WRONG: list[tuple[dict[str, Any], str, str, int]] = [
    ({"messages": []}, "messages", "at least 1", 400),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image", 400),
    ({"messages": [*HELLO, CALL, result(content=[IMAGE])]}, "messages[2].content[0].content[0].type", "image", 400),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "A"}}]}]},
        "messages[0].content[0].source.type",
        "base64",
        400,
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "tool", 400),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required", 400),
    ({"max_tokens": None}, "max_tokens", "integer", 400),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0", 400),
    ({"temperature": 3}, "temperature", "less than", 400),
    ({"stop_sequences": [str(n) for n in range(17)]}, "stop_sequences", "at most 16", 400),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "only with tools", 400),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice", "none of the tools", 400),
    ({"tools": [TOOL, TOOL]}, "tools", "same name", 400),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "a b", 400),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "not supported", 400),
    ({"service_tier": "priority"}, "service_tier", "not supported", 400),
    ({"thinking": {"type": "maybe"}}, "thinking.type", "maybe", 400),
    ({"model": "claude-opus-5"}, "model", "claude-opus-5", 404),
]


@pytest.mark.parametrize(("fields", "param", "says", "status"), WRONG, ids=[row[1] + row[2] for row in WRONG])
def test_what_is_refused(hermes: Chat, fields: dict[str, Any], param: str, says: str, status: int) -> None:
    asking.refused(MESSAGES, body(**fields), hermes[0], param, says, status)


def test_a_schema_of_the_answer(alphabet_chat: Chat) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    prompt = asking.asked(MESSAGES, body(output_config={"format": form}), alphabet_chat[0])
    assert prompt.settings.get("grammar") is not None


def test_no_tokens_read_the_prompt_ahead(alphabet_chat: Chat) -> None:
    for stream in (False, True):
        asked = body(max_tokens=0, stream=stream)
        found = (
            put_together(asking.streamed(MESSAGES, asked, alphabet_chat))
            if stream
            else asking.whole(MESSAGES, asked, alphabet_chat)
        )
        assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)


COUNTED: list[tuple[str, dict[str, Any]]] = [
    (COUNT, {"messages": HELLO}),
    (COUNT, {"messages": HELLO, "system": "Be kind.", "tools": [TOOL], "thinking": {"type": "disabled"}}),
    (
        "/v1/chat/completions/input_tokens",
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
    ),
    ("/v1/responses/input_tokens", {"input": "abc", "instructions": "Be kind."}),
]
ASKED = {
    COUNT: (MESSAGES, {"max_tokens": 1}),
    "/v1/chat/completions/input_tokens": (asking.CHAT, {}),
    "/v1/responses/input_tokens": (asking.RESPONSES, {}),
}


@pytest.mark.parametrize(("path", "fields"), COUNTED)
def test_tokens_are_counted_as_they_run(hermes: Chat, path: str, fields: dict[str, Any]) -> None:
    found = asking.computed(path, fields, hermes[0])
    (of, more) = ASKED[path]
    (text,) = asking.asked(of, {**fields, **more}, hermes[0]).texts
    assert found["input_tokens"] == len(text)


@pytest.mark.parametrize("path", ASKED)
def test_a_prompt_beyond_the_context_is_counted(hermes: Chat, path: str) -> None:
    """A client counts to learn that a conversation must be made shorter."""
    long = "abc " * 600
    fields = {"input": long} if "responses" in path else {"messages": [{"role": "user", "content": long}]}
    assert asking.computed(path, fields, hermes[0])["input_tokens"] > hermes[0].model.context
    (of, more) = ASKED[path]
    with pytest.raises(ApiError) as error:
        asking.asked(of, {**fields, **more}, hermes[0])
    assert error.value.code == "context_length_exceeded"
