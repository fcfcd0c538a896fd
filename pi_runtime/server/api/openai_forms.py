"""What OpenAI's forms share: log-probabilities, usage, and choices with the chunks of their streams."""

import time
from collections.abc import Sequence
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.engine.events import Event, PromptProgress
from pi_runtime.sequence.sampling import TokenLogprobs
from pi_runtime.sequence.stats import Stats
from pi_runtime.server.api.answer import DONE, GatheredAnswer, SseWriter, sse
from pi_runtime.server.api.prompt import Prompt
from pi_runtime.server.api.sampling import StreamingFields
from pi_runtime.server.api.served import Served, new_id
from pi_runtime.text.tokenizer import TextStream, Tokenizer

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON has not; OpenAI's value for what is very unlikely."""


class TopLogprob(TypedDict):
    """A token that might have stood in another's place."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(TopLogprob):
    """A token of an answer. One that is part of a character has that part's bytes."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities of a chat's answer: of all its tokens, those of thoughts and calls too."""

    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log-probabilities of a completion's tokens. The first one of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Log-probabilities as chats have them."""
    return {"content": [chat_logprob(tokenizer, x) for x in found], "refusal": None}


def chat_logprob(tokenizer: Tokenizer, found: TokenLogprobs) -> TokenLogprob:
    """The log-probability of one token as chats have it."""
    top = [_entry(tokenizer, token, logprob) for token, logprob in found.top]
    return {**_entry(tokenizer, found.token, found.logprob), "top_logprobs": top}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token)
    text = data.decode(errors="backslashreplace")
    return {"token": text, "bytes": list(data), "logprob": max(logprob, IMPOSSIBLE)}


class CompletionLogprobsWriter:
    """Writes log-probabilities as completions have them, with the place of each token in the text."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0, *, after: Sequence[int] = ()) -> None:
        """`after`: the tokens of the prompt, where those of an answer are written."""
        self._tokenizer, self._offset = tokenizer, offset
        self._text = TextStream(tokenizer, after=after)

    def first(self, token: int) -> CompletionLogprobs:
        """The entry of a token that nothing precedes."""
        return {
            "tokens": [self._name(token)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._next_offset(token)],
        }

    def write(self, found: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The entries of the next tokens. The likeliest ones always have the token itself among them."""
        return {
            "tokens": [self._name(x.token) for x in found],
            "token_logprobs": [max(x.logprob, IMPOSSIBLE) for x in found],
            "top_logprobs": [self._top(x) for x in found],
            "text_offset": [self._next_offset(x.token) for x in found],
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        """Names with log-probabilities; of several tokens with one name the likeliest counts."""
        pairs = [(found.token, found.logprob), *found.top]
        rising = sorted(pairs, key=lambda pair: pair[1])
        likely = {self._name(token): max(logprob, IMPOSSIBLE) for token, logprob in rising}
        return dict(reversed(likely.items()))

    def _name(self, token: int) -> str:
        """A token's text; bytes that are no text are spelled as OpenAI does."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + data.decode("latin-1").encode("unicode_escape").decode()

    def _next_offset(self, token: int) -> int:
        """The characters of the text that are complete before this token."""
        offset = self._offset
        self._offset += len(self._text.push(token))
        return offset


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    """The log-probabilities of successive parts as one."""
    return {
        "tokens": [x for part in parts for x in part["tokens"]],
        "token_logprobs": [x for part in parts for x in part["token_logprobs"]],
        "top_logprobs": [x for part in parts for x in part["top_logprobs"]],
        "text_offset": [x for part in parts for x in part["text_offset"]],
    }


class Timings(TypedDict):
    """Times in the words of llama-server; 0 where nothing was timed. Several answers count together, and the time is
    that of the longest."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    rows_read_share: NotRequired[float]
    active_share: NotRequired[float]


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
    found: Timings = {
        "cache_n": sum(s.cached_tokens for s in firsts),
        "prompt_n": prompt_n,
        "prompt_ms": 1e3 * prefill_s,
        "prompt_per_token_ms": _ratio(1e3 * prefill_s, prompt_n),
        "prompt_per_second": _ratio(prompt_n, prefill_s),
        "predicted_n": generated,
        "predicted_ms": 1e3 * decode_s,
        # The first token comes with the prompt.
        "predicted_per_token_ms": _ratio(1e3 * decode_s, after_first),
        "predicted_per_second": _ratio(after_first, decode_s),
    }
    for name in ("rows_read_share", "active_share"):
        if (mean := _mean([(getattr(s, name), s.generated_tokens) for s in answers])) is not None:
            found[name] = mean
    return found


def _ratio(part: float, of: float) -> float:
    return part / of if of else 0.0


def read_prompt(read: int, stats: Stats) -> dict[str, float]:
    """How much of a prompt has been read, in the words of llama-server."""
    seconds = 1e3 * stats.prefill_s
    return {"total": stats.prompt_tokens, "cache": stats.cached_tokens, "processed": read, "time_ms": seconds}


def _mean(shares: Sequence[tuple[float | None, int]]) -> float | None:
    """The mean share over answers that have one, weighted by their tokens."""
    known = [(share, tokens) for share, tokens in shares if share is not None]
    total = sum(tokens for _, tokens in known)
    return sum(share * tokens for share, tokens in known) / total if total else None


class Envelope(TypedDict):
    """What a response and a chunk of a stream have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Whole(Envelope):
    """A response: it has the usage."""

    usage: Usage
    timings: NotRequired[Timings]


class Chunk(Envelope):
    """A chunk of a stream; the last one has the usage and no choice, where that is asked for."""

    usage: NotRequired[Usage | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[dict[str, float]]


class ChoicesWriter(SseWriter):
    """Writes answers as choices. `kind` and `chunk_kind` are what `object` says of a response and of a chunk."""

    prefix: str
    """The beginning of the ids of responses."""
    kind: str
    chunk_kind: str

    def __init__(self, body: StreamingFields, prompt: Prompt, served: Served) -> None:
        self._prompt, self.served = prompt, served
        self.with_timings, self._with_usage = body.timings_per_token, body.include_usage
        self.with_tokens = bool(body.return_tokens)
        self.wants_logprobs = prompt.settings.get("logprobs") is not None
        self._id, self._created = new_id(self.prefix), int(time.time())

    def chunk(self, choice: Any, stats: Stats | None, event: Event | None = None) -> bytes:
        """The event of a choice, with the figures up to now where there are some, and how much has been read."""
        found = self._envelope(self.chunk_kind, [choice])
        if self._with_usage:
            found["usage"] = None
        if stats is not None and isinstance(event, PromptProgress):
            found["prompt_progress"] = read_prompt(event.read, stats)
        elif stats is not None:
            found["timings"] = timings([stats], [stats])
        return sse(found)

    def final_events(self, answers: Sequence[GatheredAnswer]) -> bytes:
        """The usage, where it is wanted, and the mark of the end."""
        if not self._with_usage:
            return DONE
        return sse(self._envelope(self.chunk_kind, []) | self._figures(answers)) + DONE

    def with_usage(self, choices: Sequence[Any], answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The response that has these choices, and the usage of its answers."""
        return self._envelope(self.kind, choices) | self._figures(answers)

    def _envelope(self, kind: str, choices: Sequence[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.served.name,
            "system_fingerprint": self.served.fingerprint,
            "choices": choices,
        }

    def _figures(self, answers: Sequence[GatheredAnswer]) -> dict[str, Any]:
        """The usage, and its timings where clients of llama-server look for them."""
        found = self._usage(answers)
        return {"usage": found, **({"timings": found["timings"]} if "timings" in found else {})}

    def _usage(self, answers: Sequence[GatheredAnswer]) -> Usage:
        ends = [answer.end for answer in answers if answer.end is not None]
        stats = [answer.stats for answer in answers if answer.stats is not None]
        firsts = [answer.stats for answer in answers[:: self._prompt.count] if answer.stats is not None]
        prompt_tokens = sum(map(len, self._prompt.texts))
        return usage(prompt_tokens, stats, firsts, sum(end.reasoning_tokens for end in ends))
