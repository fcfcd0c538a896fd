"""What a body may cost before it is read as JSON."""

import json
import random
import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_runtime.server.api.answer import Lazily, bounded, to_json
from pi_runtime.server.errors import ApiError
from pi_runtime.server.exchange import PIECE_BYTES, _piece, in_parts, parsed
from pi_runtime.server.settings import Limits

BODY_BYTES = Limits().body_bytes
LIMITS = Limits(nesting=4, brackets=1000, commas=1000)


def refusal(body: bytes, limits: Limits = LIMITS) -> str | None:
    """The code with which a body is refused before it is read as JSON; None where it is read."""
    try:
        parsed(body, limits)
    except ApiError as error:
        return error.code
    return None


def depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(depth, items), default=0)


def random_json(draws: random.Random, most: int) -> Any:
    kind = draws.choice(["list", "object", "text", "number"] if most else ["text", "number"])
    if kind == "list":
        return [random_json(draws, most - 1) for _ in range(draws.randrange(4))]
    if kind == "object":
        return {random_text(draws): random_json(draws, most - 1) for _ in range(draws.randrange(4))}
    return random_text(draws) if kind == "text" else draws.randrange(10)


def random_text(draws: random.Random) -> str:
    return "".join(draws.choices('[]{}"\\,a\n\u00e9', k=draws.randrange(8)))


@pytest.mark.parametrize("seed", range(50))
def test_depth_is_that_of_the_json(seed: int) -> None:
    draws = random.Random(seed)
    value = [random_json(draws, 7) for _ in range(6)]
    body = json.dumps(value, ensure_ascii=draws.random() < 0.5).encode()
    limits = Limits(nesting=4, brackets=1 << 20)
    assert refusal(body, limits) == ("nested_too_deep" if depth(value) > 4 else None)


@pytest.mark.parametrize(
    "filling",
    [b"a" * BODY_BYTES, b'\\"' * (BODY_BYTES // 2), b"\\\\" * (BODY_BYTES // 2), b'","' * (BODY_BYTES // 3)],
    ids=["text", "quotes", "backslashes", "strings"],
)
def test_brackets_are_counted_in_the_memory_of_a_few_bodies(filling: bytes) -> None:
    body = b"[" * 5 + b'"' + filling + b'"'
    limits = Limits(nesting=4, commas=BODY_BYTES)
    tracemalloc.start()
    try:
        assert refusal(body, limits) == "nested_too_deep"
        assert tracemalloc.get_traced_memory()[1] < 4 * BODY_BYTES
    finally:
        tracemalloc.stop()


def test_a_body_of_too_many_values_is_refused_before_they_are_made() -> None:
    body = b"[" + b",".join([b"-1"] * 1_390_000) + b"]"
    tracemalloc.start()
    try:
        assert refusal(body, Limits()) == "too_complex"
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_as_many_commas_as_are_allowed_are_read() -> None:
    assert refusal(b"[" + b",".join([b"1"] * 1001) + b"]") is None
    assert refusal(b"[" + b",".join([b"1"] * 1002) + b"]") == "too_complex"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-16", "utf-32", "utf-32-le", "latin-1"])
def test_json_is_utf_8(encoding: str) -> None:
    """In another encoding characters hide quotes and brackets: U+5B22 is both."""
    assert refusal('{"\u00e9": 1}'.encode(encoding)) == "invalid_json"
    assert refusal(("[" * 3 + '"\u00e9"' + "]" * 3).encode(encoding)) == "invalid_json"
    assert parsed('\ufeff{"\u00e9": 1}'.encode(), LIMITS) == {"\u00e9": 1}


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e400", b"1" * 400 + b".0"])
def test_what_is_no_number_is_refused(number: bytes) -> None:
    """It would come back in an answer, which then is no JSON; and `Any` has no bounds."""
    assert refusal(b'{"arguments": {"x": [' + number + b"]}}") == "invalid_json"


def test_numbers_are_as_they_were() -> None:
    body = b"[0, -1, 1.5, 1e300, -2.5e-7, 1E5, 0.1, 5e-324, 1e-999, 12345678901234567890]"
    assert parsed(body, Limits()) == json.loads(body)


ITEMS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(ITEMS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(VALUES, st.integers(0, 7))
def test_pieces_are_the_same_json(value: Any, depth: int) -> None:
    assert b"".join(in_parts(value, depth)) == to_json(value)


@pytest.mark.parametrize(
    "logprobs",
    [{"content": [{"token": "a", "top_logprobs": [{}] * 20}] * 9}, {"tokens": ["a"] * 9, "top_logprobs": [{}] * 9}],
    ids=["chat", "completion"],
)
def test_no_piece_has_several_tokens(logprobs: dict[str, Any]) -> None:
    pieces = [*in_parts({"choices": [{"index": 0, "logprobs": logprobs}]})]
    assert json.loads(b"".join(pieces))["choices"][0]["logprobs"] == logprobs
    assert max(map(len, pieces)) < 100


@given(VALUES, st.integers(0, 7))
def test_what_is_made_when_it_is_sent_is_the_same_json(value: Any, depth: int) -> None:
    wanted = to_json({"a": [value, value]})
    assert b"".join(in_parts({"a": Lazily(lambda one: one, [value, value])}, depth)) == wanted
    assert to_json({"a": Lazily(lambda one: one, [value, value])}) == wanted


def test_a_long_list_is_made_piece_by_piece() -> None:
    made = list[int]()
    parts = in_parts({"content": Lazily(lambda n: made.append(n) or {"n": n}, range(100_000))})
    assert len(_piece(parts)) < 2 * PIECE_BYTES
    assert len(made) < 20_000
    rest = _piece(parts)
    while len(piece := _piece(parts)) >= PIECE_BYTES:
        rest += piece
    assert len(made) == 100_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e999", sys.float_info.max),
        ("-1e999", -sys.float_info.max),
        ("1" * 5000, sys.float_info.max),
        ("Infinity", None),
        ("NaN", None),
        ("12345678901234567890", 12345678901234567890),
        ("-7", -7),
        ("1.5", 1.5),
        ('"1e999"', "1e999"),
    ],
)
def test_what_a_model_wrote_can_be_sent(text: str, value: Any) -> None:
    found = bounded(f'{{"x": [{text}]}}')
    assert found == {"x": [value]}
    assert type(found["x"][0]) is type(value)
    json.dumps(found, allow_nan=False)
