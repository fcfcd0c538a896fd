"""How many tokens of prompts a step reads: by what steps took, for those who wait."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_runtime.engine.scheduler import LATEST, LEAST, OWN, PieceSize, PromptPace


def settled(step_s: Callable[[int], float], most: int = 1024) -> int:
    """The piece that is taken in the end, where a step of so many tokens takes so long."""
    size, taken = PieceSize(most), []
    for _ in range(12):
        taken.append(size.tokens)
        size.count(step_s(taken[-1]), taken[-1])
    assert taken[-1] == taken[-2]
    assert all(later <= 2 * earlier for earlier, later in pairwise(taken))
    return taken[-1]


def test_a_step_that_is_mostly_fixed_cost_grows_to_all_that_the_executor_takes() -> None:
    assert settled(lambda tokens: 10 + 0.001 * tokens) == 1024
    assert settled(lambda tokens: 10.0 + 0 * tokens) == 1024
    assert settled(lambda tokens: 10 + 0.001 * tokens, most=200) == 128
    assert settled(lambda tokens: 10 + 0.001 * tokens, most=8) == 8


def test_a_step_that_is_mostly_work_stays_short() -> None:
    assert settled(lambda tokens: 0.1 + 0.05 * tokens) == LEAST
    assert settled(lambda tokens: 0.05 * tokens) == LEAST


@given(st.floats(0.01, 10), st.floats(0.0001, 1))
def test_the_work_of_a_piece_takes_as_long_as_it_may(fixed_s: float, token_s: float) -> None:
    size = settled(lambda tokens: fixed_s + token_s * tokens)
    if size > LEAST:
        assert token_s * size <= 1.001 * OWN * fixed_s
    if size < 1024:
        assert token_s * size * 2 >= 0.999 * OWN * fixed_s


def test_what_a_step_with_nobody_else_took_counts_too() -> None:
    """Its size is known then, so a piece need not grow step by step."""
    size = PieceSize(1024)
    size.count(10.5, 900)
    size.count(10.01, LEAST)
    assert size.tokens == 1024


def test_a_slow_step_counts_until_there_are_others() -> None:
    size = PieceSize(1024)
    size.count(1.0, LEAST)
    size.count(100.0, 2 * LEAST)
    assert size.tokens == LEAST
    size.count(1.01, 2 * LEAST)
    assert size.tokens == 4 * LEAST


@pytest.mark.parametrize("slow", range(LATEST))
def test_one_slow_step_of_a_size_changes_nothing(slow: int) -> None:
    size = PieceSize(1024)
    for n in range(LATEST):
        size.count(100.0 if n == slow else 1.0, LEAST)
        size.count(2.0, 2 * LEAST)
    assert size.tokens == LEAST


def test_where_nobody_waits_a_step_reads_all_that_the_executor_takes() -> None:
    pace = PromptPace(0.4, None, 1024)
    assert pace.tokens(0) == 1024
    assert pace.tokens(1) == LEAST
    first = PromptPace(0, None, 1024)
    assert first.tokens(3) == 1024  # prompts first: answers wait in any case


def test_a_piece_that_was_asked_for_is_kept() -> None:
    pace = PromptPace(0, 10, 1024)
    for decoding in (0, 1, 8):
        assert pace.tokens(decoding) == 10
        pace.count(1.0, decoding, 10)


def test_no_prompts_while_answers_are_owed_time() -> None:
    pace = PromptPace(0.5, None, 1024)
    pace.count(1.0, 1, 0)
    assert pace.tokens(1) == LEAST
    pace.count(9.0, 1, LEAST)
    assert pace.tokens(1) == 0


def read_beside(answers: int, piece: int | None) -> tuple[float, float]:
    """Seconds in which 1,500 tokens of a prompt are read, and those that 19 of 20 steps keep, in virtual time."""
    pace, left, steps = PromptPace(0.4, piece, 64), 1500, list[float]()
    while left > 0:
        tokens = min(left, pace.tokens(answers))
        seconds = 0.045 + 0.006 * answers + 0.009 * tokens
        pace.count(seconds, answers, tokens)
        left -= tokens
        steps.append(seconds)
    return sum(steps), sorted(steps)[len(steps) * 19 // 20]


@pytest.mark.parametrize("answers", [4, 7])
def test_small_pieces_shorten_long_gaps_and_delay_no_prompt(answers: int) -> None:
    (seconds, gap), (large_seconds, large_gap) = read_beside(answers, None), read_beside(answers, 2 * LEAST)
    assert gap <= 0.65 * large_gap
    assert seconds <= 1.1 * large_seconds
