"""How answers are written."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_runtime.server.api.answer import Lazily, bounded, to_json
from pi_runtime.server.response import PIECE_BYTES, _piece, in_parts

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
