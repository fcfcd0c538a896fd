"""A stop string ends the text however the pieces are cut, and nothing is held back longer than it must."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pi_runtime.errors import UsageError
from pi_runtime.text.stop_strings import StopStrings

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first end of any stop string; of those ending there, the longest."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stream, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = stream.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + stream.finish(), False


@given(st.lists(LETTERS, max_size=6), STOPS)
@example(["a", "b", "c"], ["abcd", "bc"])
@example(["aab"], ["ab", "aab"])
@example(["aabb"], ["aabb", "ab"])
@example(["ab", "ab"], ["abb", "ba"])
def test_any_cut_gives_the_naive_result(pieces: list[str], stops: list[str]) -> None:
    assert run(pieces, stops) == naive("".join(pieces), stops)


@given(LETTERS, STOPS)
def test_no_more_is_held_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown, stopped = stream.push(text)
    if not stopped:
        held = text[len(shown) :]
        assert shown + held == text
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(stop.startswith(text[n:]) for stop in stops for n in range(len(shown)))


def test_after_the_stop_nothing_comes() -> None:
    stream = StopStrings(["</s>"])
    assert stream.push("hi </") == ("hi ", False)
    assert stream.push("s> there") == ("", True)
    assert stream.push("more") == ("", True)
    assert stream.finish() == ""


def test_a_beginning_that_came_to_nothing_is_shown() -> None:
    stream = StopStrings(["###"])
    assert stream.push("a##") == ("a", False)
    assert stream.push("b#") == ("##b", False)
    assert stream.finish() == "#"
    assert stream.finish() == ""


def test_without_stops_everything_passes() -> None:
    assert StopStrings([]).push("text") == ("text", False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "END", [1]])
def test_what_is_no_stop_string_is_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError):
        StopStrings(stops)


PARTS = st.lists(st.sampled_from(["a", "b", "ab", "<s>", "</s>", "<"]), max_size=8)
SPECIAL = ("<s>", "</s>", "<s></s>")


@given(PARTS, st.lists(st.lists(st.sampled_from(["a", "b", "<s>", "</s>"]), min_size=1, max_size=3).map("".join)))
@example(["a", "</s>"], ["</s>"])
@example(["a", "<s>", "b"], ["a<s>b"])
@example(["a", "<s>", "a"], ["a<s>b"])
def test_special_tokens_stop_and_have_no_text(parts: list[str], stops: list[str]) -> None:
    """They are as their names would be, which are not shown."""
    named = [name for name in SPECIAL if any(name in stop for stop in stops)]
    stream, shown, stopped = StopStrings(stops, SPECIAL), "", False
    spelled = "".join(part for part in parts if part not in SPECIAL or part in named)
    for part in parts:
        text, stopped = stream.push("", part) if part in SPECIAL else stream.push(part)
        shown += text
        if stopped:
            break
    shown += "" if stopped else stream.finish()
    wanted, stops_there = naive(spelled, stops)
    for name in SPECIAL:
        wanted = wanted.replace(name, "")
    assert (shown, stopped) == (wanted, stops_there)


def test_the_text_of_a_special_token_stops_too() -> None:
    stream = StopStrings(["</s>"], SPECIAL)
    assert stream.push("a</") == ("a", False)
    assert stream.push("s>") == ("", True)
