"""Constrained answers: what ends is in the grammar, alone and beside others, and all else keeps its meaning."""

import importlib
import json
import random
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import requests
from support.schemas import random_schema
from support.scripted import saying, scripted_artifact
from support.synthetic import END_ID, random_artifact, small_decoder

from pi_runtime import Engine, Grammar, Model, Sampling, load
from pi_runtime.artifact.schema import Text
from pi_runtime.engine.generation import Generation
from pi_runtime.engine.stream import Stream
from pi_runtime.errors import MissingExtraError, PiError, UsageError
from pi_runtime.text import grammar as grammar_room
from pi_runtime.text import grammar_check
from pi_runtime.text.grammar import COMPILED_BYTES, LatestValues
from pi_runtime.text.grammar_check import check_grammar
from pi_runtime.text.sandbox import SandboxLimitError, SandboxLimits

pytest.importorskip("llguidance")
CONTEXT = 1024
TANGLED = Grammar.json_schema(
    {"type": "string", "allOf": [{"pattern": f"^[a-z]{{6}}(.*[a-z]{{{3 + k}}}.*7x{k}|y*)*$"} for k in range(4)]}
)
"""Patterns of which the intersection grows with the text, until it is too complex."""
DATE = Grammar.regex("[0-9]{4}-[0-9]{2}")


@pytest.fixture(scope="module", params=[(), (END_ID,), (3, END_ID)], ids=["no end", "an end", "two ends"])
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A random model that has 0, 1 or 2 ids for the end of text, of which one is a byte too."""
    decoder = small_decoder(context_length=CONTEXT)
    text = Text(prefix_ids=(), end_ids=request.param)
    path = random_artifact(tmp_path_factory.mktemp("grammar") / "a.pi", decoder, text=text, scale=2.0)
    with load(path) as model:
        yield model


def found_by(answer: Generation | Stream) -> tuple[str, list[int], str | None]:
    """Text, tokens, and the reason of the end."""
    return requests.found_by(answer)[:3]


def answers(model: Model, grammars: list[Grammar], **settings: Any) -> list[tuple[str, list[int], str | None]]:
    """One sampled answer to each grammar, all of them at once."""
    sampling = [Sampling(temperature=2.0, seed=n) for n in range(len(grammars))]
    with Engine(model, slots=8) as engine:
        streams = [
            engine.generate([1, 2, n % 200], sampling=sampling[n], grammar=grammar, **settings)
            for n, grammar in enumerate(grammars)
        ]
        return [found_by(stream) for stream in streams]


def test_separators_are_those_of_json_dumps_where_they_are_fixed(talker: Model) -> None:
    numbers = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    schema = {"type": "object", "properties": {"a": numbers, "b": {"enum": [1, 2]}}, "required": ["a", "b"]}
    schema["additionalProperties"] = False
    fixed = answers(talker, [Grammar.json_schema(schema, fixed_separators=True)] * 4)
    assert all(reason == "end" and text == json.dumps(json.loads(text)) for text, _, reason in fixed)
    free = answers(talker, [Grammar.json_schema(schema)] * 4)
    assert any(text != fixed[0][0] and len(text) > len(fixed[0][0]) + 2 for text, *_ in free)
    assert Grammar.json_schema(False, fixed_separators=True) == Grammar.json_schema(False)
    assert "x-guidance" in Grammar.json_schema("true", fixed_separators=True).source
    with pytest.raises(UsageError, match="true or false"):
        Grammar.json_schema(schema, fixed_separators="yes")  # type: ignore[arg-type]


@pytest.mark.timeout(1200)
def test_every_finished_answer_validates(talker: Model, long: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    rng = random.Random(str(talker.manifest.text.end_ids))
    schemas = [random_schema(rng) for _ in range(1000 if long else 80)]
    found = answers(talker, [Grammar.json_schema(schema) for schema in schemas])
    finished = 0
    for schema, (text, _, reason) in zip(schemas, found, strict=True):
        if reason == "end":
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            finished += 1
    print(f"{finished} of {len(schemas)} answers finished, and validate")
    assert finished >= 0.9 * len(schemas)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (DATE, r"[0-9]{4}-[0-9]{2}"),
        (Grammar.regex("(ab|c)+é?"), "(ab|c)+é?"),
        (Grammar.regex("(.|\n){0,5}"), "(.|\n){0,5}"),
        (Grammar.lark('start: "<" name ">"\nname: /[a-z]/ | "(" name ")"'), r"<\(*[a-z]\)*>"),
    ],
    ids=str,
)
def test_regular_expressions_and_lark(talker: Model, grammar: Grammar, pattern: str) -> None:
    found = answers(talker, [grammar] * 20)
    finished = [text for text, _, reason in found if reason == "end"]
    assert len(finished) > 10
    assert len(set(finished)) > 5
    for text in finished:
        assert re.fullmatch(pattern, text), text


def test_the_same_text_in_any_company(talker: Model) -> None:
    grammars = [DATE, Grammar.json_schema({"type": "string", "maxLength": 9}), Grammar.regex("(.|\n)*")] * 5
    sampling = [Sampling(temperature=2.0, seed=n) for n in range(len(grammars))]
    settings: dict[str, Any] = {"max_tokens": 30, "stop": ["z"], "min_tokens": 3, "logprobs": 1}
    alone = [
        found_by(talker.generate([1, 2, n], grammar=g, sampling=sampling[n], **settings))
        for n, g in enumerate(grammars)
    ]
    assert answers(talker, grammars, **settings) == alone


FORCING: dict[str, Any] = {
    "type": "object",
    "properties": {"a long name": {"enum": ["one of these words", "one of those words"]}, "n": {"type": "integer"}},
    "required": ["a long name", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("speculate", [1, 32, "auto"])
def test_text_that_a_grammar_forces_is_drafted_and_changes_nothing(
    talker: Model, speculate: str | int, temperature: float
) -> None:
    grammar = Grammar.json_schema(FORCING)
    settings: dict[str, Any] = {"grammar": grammar, "max_tokens": 60, "logprobs": 1}
    sampling = [Sampling(temperature=temperature, seed=n) for n in range(8)]
    wanted = [talker.generate([1, 2, n], sampling=s, speculate="off", **settings) for n, s in enumerate(sampling)]
    texts = [found_by(answer) for answer in wanted]
    assert all(text.startswith('{"a long name":"one of th') for text, _, _ in texts)
    with Engine(talker, slots=4, speculate=speculate) as engine:
        streams = [engine.generate([1, 2, n], sampling=s, **settings) for n, s in enumerate(sampling)]
        assert [found_by(stream) for stream in streams] == texts
        assert [stream.logprobs for stream in streams] == [answer.logprobs for answer in wanted]
        if speculate == 32:
            # Of one byte a token at least the name and what begins the value are forced, but the first byte.
            assert sum(stream.stats.accepted_tokens for stream in streams) >= 8 * 20


def test_what_is_forced_ends_before_the_end(talker: Model) -> None:
    state = talker.tokenizer.grammars.start(Grammar.regex("abc|abd"))
    assert state.forced([]) == list(b"ab")
    assert state.forced([ord("a")]) == [ord("b")]
    assert state.forced(list(b"ab")) == []
    only = talker.tokenizer.grammars.start(Grammar.regex("xyz"))
    assert only.forced(list(b"x")) == list(b"yz")
    assert only.forced(list(b"xyz")) == []


def test_a_complete_text_ends_at_once(tmp_path: Path) -> None:
    """No step is needed to find the end, and greedy answers obey too."""
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcdefgh"))) as model:
        answer = model.generate("a", grammar=Grammar.regex("bcd"))
        assert found_by(answer) == ("bcd", [98, 99, 100], "end")
        forced = model.generate("a", grammar=Grammar.regex("bX[a-c]{2}"), max_tokens=4)
        assert found_by(forced)[0][:2] == "bX"
        assert forced.finish_reason == "end"
        # The model ends where it may, and not sooner.
        assert found_by(model.generate("f", grammar=Grammar.regex("g[a-z]*"))) == ("gh", [103, 104], "end")
        assert len(found_by(model.generate("h", grammar=Grammar.regex("[h-z]{3,}"), max_tokens=9))[1]) == 3


def test_ends_of_other_kinds(tmp_path: Path) -> None:
    with load(scripted_artifact(tmp_path / "a.pi", saying("abcdefgh"), context=8)) as model:
        word = Grammar.regex("[a-z]{20}")
        assert found_by(model.generate("a", grammar=word, max_tokens=3)) == ("bcd", [98, 99, 100], "length")
        assert found_by(model.generate("a", grammar=word, stop=["de"]))[::2] == ("bc", "stop")
        assert found_by(model.generate("abcd", grammar=word))[2] == "context"
        # The end of the grammar comes before the most tokens do, and before the least.
        assert found_by(model.generate("a", grammar=Grammar.regex("bc"), max_tokens=2))[2] == "end"
        assert found_by(model.generate("a", grammar=Grammar.regex("bc"), min_tokens=5))[::2] == ("bc", "end")
        assert found_by(model.generate("a", grammar=Grammar.regex("(bc)?"), min_tokens=1))[0] == "bc"
        assert found_by(model.generate("a", grammar=Grammar.regex("")))[::2] == ("", "end")


BAD = {
    "schema": (lambda: Grammar.json_schema({"type": "objct"}), "Invalid type: objct"),
    "keyword": (lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "no JSON": (lambda: Grammar.json_schema("{"), "json_schema: not JSON"),
    "a list": (lambda: Grammar.json_schema("[1]"), "a JSON object"),
    "a set": (lambda: Grammar.json_schema({"enum": {1}}), "json_schema: not JSON"),
    "regex": (lambda: Grammar.regex("a(b"), "unclosed group"),
    "no text": (lambda: Grammar.regex(3), "regex\n  expected: text"),  # type: ignore[arg-type]
    "lark": (lambda: Grammar.lark("start: foo"), 'unknown name: "foo"'),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_grammar_is_refused_at_once(loop: Model, kind: str) -> None:
    make, message = BAD[kind]
    with Engine(loop) as engine:
        other = engine.generate("a", max_tokens=3)
        with pytest.raises(UsageError, match=re.escape(message)):
            engine.generate("a", grammar=make())
        assert "".join(other) == "bab"


def test_a_grammar_that_grows_too_complex_is_its_requests_error(talker: Model) -> None:
    """Which says nothing of the grammar, nor of the text."""
    with pytest.raises(PiError, match="cannot be followed") as found:
        "".join(talker.generate([1], grammar=TANGLED, sampling=Sampling(temperature=2.0, seed=1)))
    assert str(found.value) == "the grammar cannot be followed\n  found: it has become too complex here"


def test_a_drafted_text_that_grows_too_complex_changes_nothing(talker: Model) -> None:
    """A draft may go where the answer never comes: what follows is as if it had not been tried."""
    state, fresh = (talker.tokenizer.grammars.start(TANGLED, 1) for _ in range(2))
    before, tangled = [1, *b'"y'], b"qwertyuiopas" * 4
    masks = (state.allowed([*before, *tangled[:length]]) for length in range(len(tangled)))
    with pytest.raises(PiError, match="cannot be followed"):
        assert all(mask.any() for mask in masks)
    fresh = talker.tokenizer.grammars.start(TANGLED, 1)
    for seen in (before, [*before, ord("y")]):
        assert np.array_equal(state.allowed(seen), fresh.allowed(seen))
        assert state.forced(seen) == fresh.forced(seen)


def test_without_the_library(loop: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"llguidance is not installed(.|\n)*\.\[grammar\]"):
        loop.generate("a", grammar=DATE)
    assert "".join(loop.generate("a", max_tokens=1)) == "b"


def test_importing_it_needs_no_library() -> None:
    assert importlib.import_module("pi_runtime.text.grammar")


def test_answers_of_one_grammar_share_its_compilation(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Grammar] = []
    grammars = talker.tokenizer.grammars
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar: compiled.append(grammar) or compile_(grammar))
    grammar = Grammar.regex("[a-f]{7}")
    with Engine(talker) as engine:
        streams = engine.generate_many([1], 4, grammar=grammar, sampling=Sampling(temperature=2.0, seed=1))
        assert all(re.fullmatch("[a-f]{7}", "".join(stream)) for stream in streams)
    assert compiled == [grammar]


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes(talker: Model) -> None:
    grammars = talker.tokenizer.grammars
    for n in range(30):
        grammars.start(Grammar.regex("|".join(f"{n}x{k}" for k in range(4000))))
    kept = grammars._compiled
    assert 1 < len(kept._values) < 30
    assert kept._nbytes == sum(nbytes for _, nbytes in kept._values.values()) <= COMPILED_BYTES


def test_a_compiled_grammar_counts_as_what_it_was_found_to_take(talker: Model) -> None:
    small, costly = Grammar.regex("[0-9]{3}"), Grammar.json_schema({"type": "integer", "multipleOf": 10_007})
    assert check_grammar(costly) > 1 << 20
    grammars, kept = talker.tokenizer.grammars, talker.tokenizer.grammars._compiled
    grammars.start(costly, nbytes=COMPILED_BYTES)
    grammars.start(small)
    assert small in kept._values
    assert costly not in kept._values


def test_settings_name_one_grammar_or_none() -> None:
    assert Grammar.of() is None
    assert Grammar.of(regex="a") == Grammar.regex("a")
    for two in ({"regex": "a", "json_schema": {}}, {"regex": "a", "lark": "start: /a/"}):
        with pytest.raises(UsageError, match="give one of"):
            Grammar.of(**two)


def test_masks_that_take_too_long_end_their_request_alone(talker: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that alone may follow is looked at whole for each token: the longer it is the more each one costs."""
    # A quick processor is given less, so that it runs out of time too.
    monkeypatch.setattr(grammar_room, "FIRST_S", 0.1)
    monkeypatch.setattr(grammar_room, "EACH_S", 0.001)
    long, short = Grammar.regex("[ab]a{60000}"), Grammar.regex("[ab]{40}")
    wanted = "".join(talker.generate([1, 2], grammar=short))
    with Engine(talker, slots=2, speculate="off") as engine:
        costly = engine.generate([1], grammar=long)
        other = engine.generate([1, 2], grammar=short)
        with pytest.raises(PiError, match="the grammar takes too long to follow"):
            "".join(costly)
        assert len(costly.token_ids) < CONTEXT - 1
        assert "".join(other) == wanted


def test_an_answer_that_grew_too_complex_is_no_fault_of_the_next_one(talker: Model) -> None:
    """Copies of a compilation share what the library gives up."""
    running = talker.tokenizer.grammars.start(TANGLED, 1)
    with pytest.raises(PiError, match="cannot be followed"):
        "".join(talker.generate([1], grammar=TANGLED, sampling=Sampling(temperature=2.0, seed=1)))
    later = talker.tokenizer.grammars.start(TANGLED, 1)
    assert running.allowed([1, ord('"')]).sum() == later.allowed([1, ord('"')]).sum() > 1


STRING = {"type": "string"}
TOO_MUCH: dict[str, Grammar] = {
    "a large divisor": Grammar.json_schema({"properties": {"n": {"type": "integer", "multipleOf": 10000019}}}),
    "a divisor of six digits": Grammar.json_schema({"type": "integer", "multipleOf": 200_003}),
    "many optional properties": Grammar.json_schema({"properties": {f"p{n}": STRING for n in range(1000)}}),
    "a long constant": Grammar.json_schema({"const": "x" * 1_000_000}),
    "a schema that is itself": Grammar.json_schema(
        {"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"}
    ),
    "a choice of itself": Grammar.json_schema(
        {"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}, "$ref": "#/$defs/n"}
    ),
    "a long repetition": Grammar.regex("^a{100000}$"),
    "a long pattern": Grammar.json_schema({"type": "string", "pattern": "^a{100000}$"}),
    "repetitions of repetitions": Grammar.regex("((a?){300}){300}b{20000}"),
}
"""Small grammars that cost much, or fail at their first tokens."""
ENOUGH: dict[str, Grammar] = {
    "a divisor": Grammar.json_schema({"type": "integer", "multipleOf": 1009}),
    "optional properties": Grammar.json_schema({"properties": {f"p{n}": STRING for n in range(300)}}),
    "a constant": Grammar.json_schema({"const": "x" * 4000}),
    "a tree": Grammar.json_schema(
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}
    ),
    "tokens by number": Grammar.lark("start: <[151657]> TEXT <[151658]>\nTEXT: /(.|\\n)*/"),
    "a date": DATE,
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_grammar_that_costs_much_is_refused_before_it_is_compiled(kind: str) -> None:
    with pytest.raises(UsageError, match=r"too complex|cannot be used"):
        check_grammar(TOO_MUCH[kind])


@pytest.mark.parametrize("kind", ENOUGH)
def test_a_usual_grammar_is_found_good(kind: str) -> None:
    check_grammar(ENOUGH[kind])


def test_what_passes_the_check_begins(talker: Model) -> None:
    for kind, grammar in ENOUGH.items():
        if kind != "tokens by number":  # which this model has not
            "".join(talker.generate([1], grammar=grammar, max_tokens=20, sampling=Sampling(temperature=1.0, seed=1)))


def test_a_child_that_had_little_to_do_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "_idle", deque(maxlen=2))
    check_grammar(Grammar.regex(f"a{{{time.time_ns() % 1000 + 1}}}b"))
    (child,) = grammar_check._idle
    check_grammar(Grammar.regex(f"a{{{time.time_ns() % 1000 + 1}}}c"))
    assert [*grammar_check._idle] == [child]
    with pytest.raises(UsageError, match="too complex"):
        check_grammar(Grammar.json_schema({"properties": {"m": {"type": "integer", "multipleOf": 10000019}}}))
    assert not grammar_check._idle, "what took long may have left much behind"
    child.close()


def test_the_oldest_go_first_and_use_makes_young() -> None:
    kept, made = LatestValues[str, str](100), list[str]()

    def get(key: str, nbytes: int = 40) -> None:
        kept.get(key, nbytes, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    for key in "abacab":
        get(key)
    assert made == ["a", "b", "c", "b"]


def test_one_that_is_larger_than_all_may_be_is_kept_alone() -> None:
    kept = LatestValues[str, int](100)
    kept.get("a", 10, lambda: 1)
    kept.get("b", 1000, lambda: 2)
    assert kept.get("b", 1000, lambda: 3) == 2
    assert kept.get("a", 10, lambda: 4) == 4
    assert kept.get("b", 1000, lambda: 5) == 5


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    kept = LatestValues[str, float](100)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", 1, lambda: 1 / 0)
    assert kept.get("a", 1, lambda: 2.0) == 2.0


def test_a_grammar_that_was_tried_is_known_by_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Grammar] = []
    monkeypatch.setattr(grammar_check, "_reply", lambda grammar, *_: tried.append(grammar) or {"text": "", "nbytes": 7})
    grammar = Grammar.regex("x" * 100_000)
    assert [grammar_check.check_grammar(grammar) for _ in range(2)] == [7, 7]
    assert tried == [grammar]
    assert all(len(key) == grammar_check.DIGEST_BYTES for key in grammar_check._known._values)


def test_a_refusal_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, now, tried = Grammar.json_schema({"const": "refused"}), [0.0], list[Grammar]()
    monkeypatch.setattr(grammar_check.time, "monotonic", lambda: now[0])
    replies = iter([SandboxLimitError("time"), {"text": "wrong"}, {"text": "", "nbytes": 7}])

    def asked(one: Grammar, _: SandboxLimits, _seconds: float) -> dict[str, Any]:
        tried.append(one)
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(grammar_check, "_reply", asked)
    for count, match in ((1, "too complex.*within 5 s"), (2, "cannot be used.*wrong")):
        for _ in range(3):
            with pytest.raises(UsageError, match=f"(?s){match}"):
                grammar_check.check_grammar(grammar)
            assert len(tried) == count
        now[0] += grammar_check.KNOWN_S + 1
    for _ in range(3):
        grammar_check.check_grammar(grammar)
    assert len(tried) == 3
