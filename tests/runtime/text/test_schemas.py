"""Schemas of somebody else: what is left out of them, what shut objects hold, and the white space of JSON."""

import json
import random
import re
from typing import Any

import pytest
from support.grammars import takes
from support.synthetic import END_ID, byte_tokenizer

from pi_runtime import Grammar
from pi_runtime.artifact.schema import Text
from pi_runtime.errors import UsageError
from pi_runtime.text import schemas
from pi_runtime.text.schemas import closed, followed, referred
from pi_runtime.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
S: dict[str, Any] = {"type": "string"}
N: dict[str, Any] = {"type": "integer"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), Text(prefix_ids=(), end_ids=(END_ID,)), vocab_size=END_ID + 1)


def props(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


ODD = {
    "lookahead": ({"type": "string", "pattern": "^(?!x).+@.+$"}, S),
    "a negative lookbehind": ({"type": "string", "pattern": "(?<!a)b"}, S),
    "a reference back": ({"type": "string", "pattern": r"(a)\1"}, S),
    "a word's end": ({"type": "string", "pattern": r"\bfoo\b"}, S),
    "a pattern that is a number": ({"type": "string", "pattern": 3}, S),
    "uniqueItems": ({"type": "array", "items": S, "uniqueItems": True}, {"type": "array", "items": S}),
    "contains": ({"type": "array", "contains": S, "minContains": 1}, {"type": "array"}),
    "not": ({"not": S}, {}),
    "if": ({**props(a=S), "if": props(a=S), "then": props(b=S), "else": False}, props(a=S)),
    "dependent properties": ({**props(a=S), "dependentRequired": {"a": ["b"]}}, props(a=S)),
    "names of properties": ({"type": "object", "propertyNames": S}, {"type": "object"}),
    "a format that is a list": ({"type": "string", "format": ["date"]}, S),
    "an unknown format": ({"type": "string", "format": "postcode"}, S),
    "a reference to nothing": (props(a={"$ref": "#/$defs/a"}), props(a={})),
    "a reference to another document": ({"$ref": "https://example.org/a"}, {}),
    "a reference that is a list": ({"$ref": ["a"]}, {}),
    "a large number": ({"type": "integer", "minimum": -(10**30), "maximum": 5}, {"type": "integer", "maximum": 5}),
    "a bound that is text": ({"type": "integer", "minimum": "1"}, N),
    "a multiple of nothing": ({"type": "number", "multipleOf": 0}, {"type": "number"}),
    "a negative length": ({"type": "string", "minLength": -1}, S),
    "half a length": ({"type": "string", "minLength": 1.5}, S),
    "an unknown type": (props(a={"type": "str"}), props(a={})),
    "no type": ({"type": []}, {}),
    "required in a property": (props(a={"type": "string", "required": True}), props(a=S)),
    "required as text": ({**props(a=S), "required": "a"}, props(a=S)),
    "enum as text": ({"enum": "a, b"}, {}),
    "an empty enum": ({"enum": []}, {}),
    "a schema that is text": (props(a="string"), props(a=True)),
    "properties that are text": ({"type": "object", "properties": "a"}, {"type": "object"}),
    "branches that are none": ({"anyOf": {"a": S}}, {}),
    "a key's pattern": ({"patternProperties": {"^(?=a)": S, "^b": N}}, {"patternProperties": {"^b": N}}),
    "no schema": ("string", True),
}
"""A schema, and what is left of it. Each has something that cannot be followed."""
PLAIN = {
    "PHP's properties": ({"type": "object", "properties": []}, props()),
    "PHP's schema": (props(a=[]), props(a=True)),
    "PHP's definitions": ({"$defs": [], "definitions": []}, {"$defs": {}, "definitions": {}}),
    "PHP's items": ({"type": "array", "items": []}, {"type": "array"}),
    "null": (
        {"type": "string", "pattern": None, "enum": None, "format": None, "minLength": None, "description": None},
        S,
    ),
    "null that is meant": ({"const": None}, {"const": None}),
    "items that may be the same": ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    "branches of nothing": ({"dependentRequired": {}, "if": None, "then": None}, {}),
    "a whole length": ({"type": "string", "minLength": 2.0}, {"type": "string", "minLength": 2}),
    "words about it": (
        {"title": 3, "default": {}, "nullable": True, "x-y": []},
        {"title": 3, "default": {}, "nullable": True, "x-y": []},
    ),
    "a dialect that nobody knows": ({"$schema": "mine", "$id": "a b", **S}, S),
    "a known dialect": ({"$schema": "http://json-schema.org/draft-07/schema#"},) * 2,
    "a name of a place": (props(a={"$ref": "#x"}) | {"$defs": {"x": {"$anchor": "x", **S}}},) * 2,
    "itself": (props(a={"$ref": "#"}),) * 2,
    "the fourth draft's bounds": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True},) * 2,
    "JavaScript's integers": ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},) * 2,
    "properties with keywords for names": (props(pattern=N, uniqueItems=N, **{"not": S, "$ref": S}),) * 2,
    "values with keywords": ({"enum": [{"not": 1}, {"pattern": "(?!"}], "default": {"not": 1}},) * 2,
    "everything": (True, True),
}
"""A schema, and the same as it is read. Nothing of it is lost."""


@pytest.mark.parametrize("case", {**ODD, **PLAIN})
def test_what_cannot_be_followed_is_left_out_and_said(case: str) -> None:
    given, left = {**ODD, **PLAIN}[case]
    for is_advice in (False, True):
        found = followed(given, is_advice=is_advice)
        assert found.schema == left
        assert bool(found.left_out) == (case in ODD)


@pytest.mark.parametrize("case", {**ODD, **PLAIN})
def test_what_is_left_can_be_compiled(case: str, tokenizer: Tokenizer) -> None:
    given, _ = {**ODD, **PLAIN}[case]
    tokenizer.grammars.start(Grammar.json_schema(closed(followed(given).schema)))


def test_what_is_left_out_is_named() -> None:
    schema = {"properties": {"a": {"items": {"anyOf": [S, {"pattern": "(?!x)"}]}}, "b": {"format": "x"}}, "not": {}}
    assert followed(schema).left_out == [
        "properties.a.items.anyOf[1].pattern: look-around cannot be followed",
        "properties.b.format: 'x' is no format that is known here",
        "not: cannot be followed",
    ]


def test_advice_is_what_a_text_comes_to_an_end_for() -> None:
    given = {"oneOf": [S, {"type": "string", "minLength": 2}], "minLength": 10**6, "maxItems": 10**9}
    assert followed(given).schema == given
    assert followed(given, is_advice=True).schema == {"allOf": [{"anyOf": given["oneOf"]}]}
    bounded = {**props(a=S, b=S), "minProperties": 1}
    assert followed(bounded).schema == bounded
    assert followed(bounded, is_advice=True).schema == props(a=S, b=S)


def test_a_schema_that_is_all_of_itself_is_read_to_its_end() -> None:
    whole = {"$defs": {"n": {"allOf": [{"$ref": "#/$defs/n"}], **A}}, "$ref": "#/$defs/n"}
    assert followed(whole).schema == whole
    assert closed(whole)["$defs"]["n"]["additionalProperties"] is False  # type: ignore[index]


DEEP: Any = {}
for _ in range(5000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize("case", ODD)
def test_what_is_no_schema_is_shut_as_far_as_it_is_one(case: str) -> None:
    given, _ = ODD[case]
    for schema in (
        given,
        {**A, "allOf": [given, K]},
        {"anyOf": [given], **A},
        {**(given if isinstance(given, dict) else {}), "required": ["z"]},
    ):
        closed(schema)


def test_what_is_too_deep_or_too_large() -> None:
    assert followed(DEEP).left_out == ["it is too deep"]
    with pytest.raises(UsageError, match="too deep"):
        closed(DEEP)
    doubled: Any = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    with pytest.raises(UsageError, match="too complex"):
        closed({"$defs": doubled, "$ref": "#/$defs/d0", "properties": {}})


MANY = [f"p{n}" for n in range(2000)]
LARGE: dict[str, Any] = {
    "an object, many times": {
        "$defs": {"o": props(**dict.fromkeys(MANY, True))},
        "allOf": [{"$ref": "#/$defs/o"}] * 2000,
    },
    "a text, many times": {"$defs": {"o": {"enum": ["x" * 10**6]}}, "allOf": [{"$ref": "#/$defs/o"}] * 1000},
    "names in many branches": {**props(**dict.fromkeys(MANY, S)), "anyOf": [{"required": ["a"]}] * 2000},
    "names that are required": {"required": MANY, "anyOf": [{"properties": {}}] * 2000},
}


@pytest.mark.parametrize("case", LARGE)
def test_a_small_schema_does_not_become_a_large_one(case: str) -> None:
    with pytest.raises(UsageError, match="too complex"):
        closed(LARGE[case])


@pytest.mark.parametrize("keyword", ["minLength", "maxItems", "minimum", "multipleOf", "const"])
@pytest.mark.parametrize("number", [10**400, -(10**400), 10**18, 1e308, 1e-308])
def test_numbers_beyond_all_bounds_are_no_fault(keyword: str, number: float) -> None:
    for is_advice in (False, True):
        closed(followed({keyword: number}, is_advice=is_advice).schema)


def test_places_stay_short() -> None:
    keys = "k" * 10**5
    schema = {"properties": {keys: {"properties": {keys: {"not": {}}, **{key: {"not": {}} for key in MANY}}}}}
    left_out = followed(schema).left_out
    assert len(left_out) == 2001
    assert max(map(len, left_out)) < 300


A, B, K = props(("a",), a=S), props(b=N), props(("k",), k=S)
TREE = {"$defs": {"tree": props(("v",), v=N, kids={"type": "array", "items": {"$ref": "#/$defs/tree"}})}}
SHUT: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "properties": (A, [{"a": "x"}], [{"a": "x", "c": 1}]),
    "properties without a type": ({"properties": {"a": S}}, [{"a": "x"}, {}], [{"c": 1}]),
    "no properties": (props(), [{}], [{"c": 1}]),
    "an object": ({"type": "object"}, [{}, {"c": {"d": [{}]}}], []),
    "opened": ({**A, "additionalProperties": True}, [{"a": "x", "c": 1}], []),
    "opened for some": ({**A, "additionalProperties": N}, [{"a": "x", "c": 1}], [{"a": "x", "c": "y"}]),
    "shut by itself": ({**A, "additionalProperties": False}, [{"a": "x"}], [{"a": "x", "c": 1}]),
    "opened in new words": ({**A, "unevaluatedProperties": N}, [{"a": "x", "c": 1}], [{"a": "x", "c": "y"}]),
    "shut in new words": ({**A, "unevaluatedProperties": False}, [{"a": "x"}], [{"a": "x", "c": 1}]),
    "patterns of names": ({"type": "object", "patternProperties": {"^x": N}}, [{"x1": 1}, {}], [{"y": 1}]),
    "a name that is required only": ({**props(a=S), "required": ["z"]}, [{"a": "x", "z": [1]}], [{"z": 1, "c": 1}, {}]),
    "within": (props(("o",), o=A), [{"o": {"a": "x"}}], [{"o": {"a": "x", "c": 1}}]),
    "within a list": ({"type": "array", "items": A}, [[{"a": "x"}], []], [[{"a": "x", "c": 1}]]),
    "within a tuple": ({"type": "array", "prefixItems": [A]}, [[{"a": "x"}]], [[{"a": "x", "c": 1}]]),
    "all of two": ({"allOf": [A, B]}, [{"a": "x", "b": 1}, {"a": "x"}], [{"b": 1}, {"a": "x", "c": 1}]),
    "all of one": ({"allOf": [A], "description": "x"}, [{"a": "x"}], [{"a": "x", "c": 1}]),
    "all of a reference": (
        {"$defs": {"A": A}, **props(("o",), o={"allOf": [{"$ref": "#/$defs/A"}], "default": {}})},
        [{"o": {"a": "x"}}],
        [{"o": {"a": "x", "c": 1}}],
    ),
    "all of references": (
        {"$defs": {"A": A, "B": B}, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, K]},
        [{"a": "x", "b": 1, "k": "y"}],
        [{"a": "x", "b": 1, "k": "y", "c": 1}, {"a": "x", "b": 1}],
    ),
    "all of some, deep": (
        {"allOf": [{"allOf": [A, {"allOf": [B]}]}, {"properties": {"k": {"allOf": [A, B]}}}]},
        [{"a": "x", "b": 1, "k": {"a": "x", "b": 2}}],
        [{"a": "x", "k": {"a": "x", "c": 1}}, {"a": "x", "c": 1}],
    ),
    "all of some, one of them open": (
        {"allOf": [{**A, "additionalProperties": True}, B]},
        [{"a": "x", "b": 1, "c": 1}],
        [{"b": 1}],
    ),
    "a reference and more": (
        {"$defs": {"A": A}, "$ref": "#/$defs/A", "properties": {"b": N}},
        [{"a": "x", "b": 1}],
        [{"b": 1}, {"a": "x", "c": 1}],
    ),
    "any of two": ({"anyOf": [A, B]}, [{"a": "x"}, {"b": 1}, {}], [{"a": "x", "b": 1}, {"c": 1}]),
    "one of two": (
        {"oneOf": [props(("t", "a"), t={"const": 1}, a=S), props(("t",), t={"const": 2})]},
        [{"t": 1, "a": "x"}, {"t": 2}],
        [{"t": 2, "a": "x"}, {"t": 1}],
    ),
    "any of two and more": (
        {**K, "anyOf": [A, B]},
        [{"k": "y", "a": "x"}, {"k": "y", "b": 1}, {"k": "y"}],
        [{"a": "x"}, {"k": "y", "c": 1}, {"k": "y", "b": "x"}],
    ),
    "any of what is required": (
        {**props(a=S, b=N), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": 1}, {"a": "x", "b": 1}],
        [{}, {"a": "x", "c": 1}],
    ),
    "any of references and more": (
        {"$defs": {"A": A, "B": B}, **K, "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
        [{"k": "y", "a": "x"}, {"k": "y", "b": 1}],
        [{"k": "y", "c": 1}, {"k": "y", "a": "x", "b": 1}],
    ),
    "an object or nothing": (
        props(("o",), o={"anyOf": [A, {"type": "null"}]}),
        [{"o": None}, {"o": {"a": ""}}],
        [{"o": {}}],
    ),
    "a tree": (
        {**TREE, "$ref": "#/$defs/tree"},
        [{"v": 1, "kids": [{"v": 2}, {"v": 3, "kids": []}]}],
        [{"v": 1, "kids": [{"v": 2, "c": 1}]}],
    ),
    "a tree with more": (
        {**TREE, "allOf": [{"$ref": "#/$defs/tree"}, B]},
        [{"v": 1, "kids": [{"v": 2}], "b": 1}],
        [{"v": 1, "c": 1}, {"v": 1, "kids": [{"v": 2, "b": 1}]}],
    ),
    "itself": (props(me={"$ref": "#"}), [{"me": {"me": {}}}], [{"me": {"you": {}}}]),
    "everything": (True, [1, {"a": []}], []),
}
"""A schema, what follows it, and what does not once it is shut."""


@pytest.mark.parametrize("case", SHUT)
def test_objects_are_shut_unless_their_schema_opens_them(case: str, tokenizer: Tokenizer) -> None:
    """jsonschema agrees that all that is taken follows the schema as it was given, and as it is shut."""
    jsonschema = pytest.importorskip("jsonschema")
    schema, good, bad = SHUT[case]
    grammar, shut = Grammar.json_schema(schema), closed(schema)
    for value in good:
        assert takes(tokenizer, grammar, json.dumps(value)), value
        jsonschema.validate(value, schema)
        jsonschema.validate(value, shut)
    for value in bad:
        assert not takes(tokenizer, grammar, json.dumps(value)), value
        assert not jsonschema.Draft202012Validator(shut).is_valid(value)
    assert closed(shut) == shut
    assert Grammar.json_schema(shut) == grammar


def random_together(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object whose schema has several parts that hold together, now and then within one another."""
    kinds: list[dict[str, Any]] = [{"enum": ["x", 1]}, {"type": "boolean"}, {"const": None}, {"$ref": "#/$defs/d"}]

    def part(names: str) -> dict[str, Any]:
        chosen = rng.sample(names, rng.randint(0, len(names)))
        values = [
            random_together(rng, depth - 1) if depth and rng.random() < 0.4 else rng.choice(kinds) for _ in chosen
        ]
        found: dict[str, Any] = {"properties": dict(zip(chosen, values, strict=True))}
        found["required"] = [name for name in chosen if rng.random() < 0.4]
        return {**found, "type": "object"} if rng.random() < 0.3 else found

    whole = {"type": "object", **(part("abc") if rng.random() < 0.7 else {})}
    ways: dict[str, Any] = {
        "allOf": [part("def"), part("gh"), {"$ref": "#/$defs/d"}],
        "anyOf": [part("ij"), part("kl"), {"required": ["i"]}, {"$ref": "#/$defs/e"}],
        "$ref": rng.choice(["#/$defs/d", "#/$defs/e"]),
    }
    for key in rng.sample([*ways], rng.randint(0, 2)):
        whole[key] = ways[key] if key == "$ref" else rng.sample(ways[key], rng.randint(1, 3))
    return whole


D, E = props(("m",), m={"enum": [1, 2]}), {"allOf": [{"$ref": "#/$defs/d"}], **props(n={"type": "null"})}


def test_random_texts_of_schemas_with_parts_validate(tokenizer: Tokenizer, long: bool) -> None:
    """What a grammar lets through follows the schema as it was given, and has no names that it has not."""
    jsonschema = pytest.importorskip("jsonschema")
    rng, finished, wanted = random.Random(5), 0, 1000 if long else 50
    for _ in range(wanted):
        schema = {**random_together(rng), "$defs": {"d": D, "e": E}}
        state, ids = tokenizer.grammars.start(Grammar.json_schema(schema, fixed_separators=True)), list[int]()
        while ids[-1:] != [END_ID] and not state.is_complete(ids) and len(ids) < 600:
            ids.append(rng.choice(state.allowed(ids).nonzero()[0].tolist()))
        text = bytes(one for one in ids if one != END_ID).decode()
        if len(ids) < 600:
            jsonschema.validate(json.loads(text), schema)
            jsonschema.validate(json.loads(text), closed(schema))
            finished += 1
            assert set(re.findall(r'"(\w)":', text)) <= set("abcdefghijklmn"), text
    assert finished > 0.9 * wanted


SPACES = {
    "": True,
    " ": True,
    "\n": True,
    "\n\n": True,
    "\n\n\t" + 19 * " ": True,
    "\n" + 20 * " ": True,
    "  ": False,
    "\t": False,
    " \n": False,
    "\n\n\n": False,
    "\n" + 21 * " ": False,
    "\r\n": False,
}
"""White space, and whether llama.cpp's grammars have it (`SPACE_RULE` of common/json-schema-to-grammar.cpp)."""


@pytest.mark.parametrize("schema", [props(("a",), a={"type": "array", "items": N}), {"type": "object"}, True])
def test_white_space_is_bounded(schema: Any, tokenizer: Tokenizer) -> None:
    grammar = Grammar.json_schema(schema)
    for space, is_taken in SPACES.items():
        for text in ('{%s"a":[1]}', '{"a":%s[1]}', '{"a":[%s1]}', '{"a":[1%s]}', '{"a":[1]%s}', '{"a":[1,%s2]}'):
            assert takes(tokenizer, grammar, text % space) == is_taken, (text, space)
    assert takes(tokenizer, grammar, json.dumps({"a": [1, 2]}, indent=2))
    fixed = Grammar.json_schema(schema, fixed_separators=True)
    assert takes(tokenizer, fixed, json.dumps({"a": [1, 2]}))
    assert not takes(tokenizer, fixed, '{"a":[1]}')
    assert not takes(tokenizer, fixed, '{ "a": [1]}')


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("#", {"a/b": [1, {"c~": 2}], "é": 3}),
        ("#/a~1b/0", 1),
        ("#/a~1b/1/c~0", 2),
        ("#/%C3%A9", 3),
        ("#/a~1b/7", None),
        ("#/a~1b/x", None),
        ("#/nowhere/at/all", None),
        ("#a", None),
        ("other#/a~1b", None),
        ("", None),
    ],
)
def test_references(ref: str, found: Any) -> None:
    assert referred(ref, {"a/b": [1, {"c~": 2}], "é": 3}) == found


def test_the_table_of_keywords_is_llguidances() -> None:
    """Each keyword that is left out is refused by the library, and each that stays is not."""
    llguidance = pytest.importorskip("llguidance")
    for key in schemas.BEYOND:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "object", key: {}}))
        assert "Unimplemented keys" in llguidance.LLMatcher.validate_grammar(source), key
    for name in schemas.FORMATS:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "format": name}))
        assert not llguidance.LLMatcher.validate_grammar(source), name
