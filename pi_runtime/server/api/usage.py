"""What a request took: tokens in OpenAI's form, and the times and shares that only this server knows."""

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.sequence.stats import Stats

FINISH_REASONS: dict[str, Literal["stop", "length"]] = {
    "end": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "cancelled": "stop",
}
"""OpenAI's word for each of the engine's."""


class Timings(TypedDict):
    """Times in the words of llama-server. Several answers count together, and the time is that of the longest."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    rows_read_share: float | None
    active_share: float | None


class PromptTokensDetails(TypedDict):
    """Tokens of the prompt that did not run again."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Tokens of the answers: those of thoughts, and guessed ones by whether they were right."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens of a request, all its answers together; a prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    timings: NotRequired[Timings]


def usage(prompt_tokens: int, answers: Sequence[Stats], firsts: Sequence[Stats], reasoning_tokens: int = 0) -> Usage:
    """The usage of a request. `firsts`: the first answer to each prompt, which says what was stored of it."""
    generated = sum(s.generated_tokens for s in answers)
    accepted = sum(s.accepted_tokens for s in answers)
    found: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(s.guessed_tokens for s in answers) - accepted,
        },
    }
    if answers:
        found["timings"] = timings(answers, firsts)
    return found


def timings(answers: Sequence[Stats], firsts: Sequence[Stats]) -> Timings:
    """The timings of answers that ran together."""
    prompt_n = sum(s.prompt_tokens - s.cached_tokens for s in firsts)
    generated = sum(s.generated_tokens for s in answers)
    prefill_s, decode_s = max(s.prefill_s for s in answers), max(s.decode_s for s in answers)
    after_first = sum(max(s.generated_tokens - 1, 0) for s in answers)
    return {
        "cache_n": sum(s.cached_tokens for s in firsts),
        "prompt_n": prompt_n,
        "prompt_ms": 1e3 * prefill_s,
        "prompt_per_second": prompt_n / prefill_s if prefill_s else None,
        "predicted_n": generated,
        "predicted_ms": 1e3 * decode_s,
        # The first token comes with the prompt.
        "predicted_per_second": after_first / decode_s if decode_s and after_first else None,
        "rows_read_share": _mean([(s.rows_read_share, s.generated_tokens) for s in answers]),
        "active_share": _mean([(s.active_share, s.generated_tokens) for s in answers]),
    }


def _mean(shares: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean share over answers that have one, weighted by their tokens."""
    known = [(share, tokens) for share, tokens in shares if share is not None]
    total = sum(tokens for _, tokens in known)
    return sum(share * tokens for share, tokens in known) / total if total else None
