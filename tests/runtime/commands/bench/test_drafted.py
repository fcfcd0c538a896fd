"""What drafts gained in an answer: drawn where they run, and said in one line."""

from pathlib import Path

from pi_runtime import load
from pi_runtime.commands.bench import rendering
from pi_runtime.commands.bench.measurement import ANSWER_TOKENS, DraftedAnswer


def test_an_answer_in_a_loop_is_drafted(endless: Path) -> None:
    with load(endless, context=200, device="cpu") as model:
        found = DraftedAnswer.of(model)
    assert found.tokens == ANSWER_TOKENS
    assert found.accepted_length is None or found.accepted_length >= 1


def test_it_is_said_in_a_line() -> None:
    facts = {"mode": "auto", "tokens": 64, "acceptance": 0.5, "accepted_length": 2.25, "drafts_won_s": -0.5}
    assert rendering._drafted(facts) == "auto: 2.25 tokens a draft, 50% right, -0.50 s won in 64 tokens"
    wanted = "auto: 2.25 tokens a draft, 50% right, 75% by the guess head, -0.50 s won in 64 tokens"
    assert rendering._drafted({**facts, "by_head": 0.75}) == wanted
    assert rendering._drafted({**facts, "accepted_length": None}) == "auto: no draft ran"
