"""Log-probabilities in the two forms of OpenAI: of chats, and of completions, which echo their prompts too."""

from collections import deque
from collections.abc import Sequence

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from pi_runtime.sequence.logprobs import TokenLogprobs
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


class ShownLogprobs:
    """Lets the log-probabilities of tokens through as their text is shown, and drops those of a stop string.

    What comes in one part depends on how fast it is read; what comes in all does not.
    """

    def __init__(self, tokenizer: Tokenizer, shown_tokens: Sequence[int] = (), *, after: Sequence[int] = ()) -> None:
        """`after`: the tokens of the prompt."""
        self._text = TextStream(tokenizer, shown_tokens, after=after)
        self._held: deque[tuple[int, TokenLogprobs]] = deque()
        """Tokens whose text has not been shown, each with where its text begins."""
        self._chars = self._shown = 0

    def take(self, text: str, found: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Take text that is shown, and tokens; returns those whose text has been shown now."""
        self._shown += len(text)
        for token in found:
            self._held.append((self._chars, token))
            self._chars += len(self._text.push(token.token))
        due = []
        while self._held and self._held[0][0] < self._shown:
            due.append(self._held.popleft()[1])
        return due

    def finish(self, finish_reason: str) -> list[TokenLogprobs]:
        """Return the log-probabilities that are still held, unless their tokens belong to a stop string."""
        return [] if finish_reason == "stop" else [token for _, token in self._held]


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
