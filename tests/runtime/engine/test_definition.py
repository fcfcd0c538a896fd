"""What an answer is: where it ends and what its text is, said once more in a few lines and held against both."""

from pathlib import Path
from typing import Any

import pytest
from support.definition import answer_of, before_stop
from support.requests import found_by

from pi_runtime import Engine, Sampling, load


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("abc", (), None),
        ("abc", ("d",), None),
        ("abc", ("c",), "ab"),
        ("abcd", ("bcd", "c"), "ab"),  # complete first
        ("abcd", ("c", "bc"), "a"),  # the longest of those that are complete together
        ("aaa", ("aa",), ""),
    ],
)
def test_where_a_stop_string_ends_a_text(text: str, stops: tuple[str, ...], before: str | None) -> None:
    assert before_stop(text, stops) == before


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_tokens": 3}, "length"),
        ({"max_tokens": 9, "stop": ["d"]}, "stop"),
        ({"max_tokens": 9, "stop": ["d"], "min_tokens": 4}, "length"),
        ({"max_tokens": 60}, "end"),
    ],
    ids=str,
)
def test_the_alphabet_is_what_all_three_say(alphabet: Path, settings: dict[str, Any], reason: str) -> None:
    prompt, greedy = [ord("a")], Sampling(temperature=0)
    with load(alphabet, device="cpu") as model, Engine(model) as engine:
        wanted = answer_of(model, prompt, sampling=greedy, **settings)
        assert wanted == found_by(model.generate(prompt, sampling=greedy, speculate="off", **settings))
        assert wanted == found_by(engine.generate(prompt, sampling=greedy, **settings))
    assert wanted[2] == reason
    assert wanted[0]
