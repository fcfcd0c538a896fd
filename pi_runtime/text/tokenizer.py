"""Text to token ids and back, by the `tokenizers` library; the manifest says which ids frame a text."""

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import ParamSpec, TypeVar

import tokenizers

from pi_runtime.artifact.schema import Text
from pi_runtime.errors import ArtifactError, PromptError
from pi_runtime.text.grammar import GrammarCompiler
from pi_runtime.text.quotation import RenderedPrompt, markers_of
from pi_runtime.text.quoting_tokens import QuotingTokens

P = ParamSpec("P")
T = TypeVar("T")

REPLACEMENT = "\ufffd"
WORD_BEGIN = "\u2581"  # what SentencePiece writes for a space
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
UNFINISHED = 3
"""Most tokens of an unfinished character: it has four bytes at most, and each token has one or more."""


class Tokenizer:
    """One model's tokenizer."""

    def __init__(self, data: bytes, text: Text, *, vocab_size: int) -> None:
        """`data` is what `tokenizer.json` holds, `vocab_size` the model's. Raises ArtifactError for a bad file."""
        self._library = _call("is not usable", tokenizers.Tokenizer.from_buffer, data)
        # Published files carry the settings of their last training run; a prompt is never cut or padded.
        self._library.no_truncation()
        self._library.no_padding()
        added = self._library.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self._added = {token.content: token.special for token in added}
        self._prefix_ids, self._end_ids, self._vocab_size = list(text.prefix_ids), text.end_ids, vocab_size

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token, or more."""
        return max((len(token.encode()) for token in self._library.get_vocab()), default=1)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars over these tokens. Raises MissingExtraError where its library is not installed."""
        return GrammarCompiler(self._library, self._end_ids, self._vocab_size)

    def encode(self, text: str, *, prefix: bool = True) -> list[int]:
        """The ids of `text`, without the tokenizer's own framing.

        With `prefix` they begin with the manifest's `prefix_ids`. Those that the text itself begins with, as a rendered
        chat does, are not repeated. Markers that a `RenderedPrompt` quotes are text. Raises PromptError for text that
        is not Unicode, ArtifactError where tokenizer and model do not belong together.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the prompt is not Unicode text at character {error.start}", found=error.reason
            ) from None
        ids = _call("cannot encode this text", self._text_ids, text)
        if max(ids, default=0) >= self._vocab_size:
            raise ArtifactError(
                "tokenizer.json has tokens that the model has not",
                expected=f"ids below {self._vocab_size}",
                found=f"id {max(ids)} for {self._library.id_to_token(max(ids))!r}",
            )
        if not prefix:
            return ids
        shared = 0
        while shared < min(len(ids), len(self._prefix_ids)) and ids[shared] == self._prefix_ids[shared]:
            shared += 1
        return self._prefix_ids + ids[shared:]

    def _text_ids(self, text: str) -> list[int]:
        if isinstance(text, RenderedPrompt) and text.cuts:
            return self._quoting.ids(text)
        # Unlike `encode` it lets other threads run meanwhile, and looks for no offsets.
        ids: list[int] = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def _quoting(self) -> QuotingTokens:
        """What encodes prompts with quotations: made for the first of them, as it takes a second tokenizer's room."""
        return QuotingTokens(self._library)

    def markers(self, template: str) -> list[str]:
        """The texts of tokens that only this chat template may write (see `markers_of`)."""
        return markers_of(self._added, template)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The special tokens, which have no text, by their names."""
        added = self._library.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    def added_token(self, text: str) -> int | None:
        """The id of a text that is a token of its own, special or not; None where it is none."""
        token: int | None = self._library.token_to_id(text) if text in self._added else None
        return None if token is None or token >= self._vocab_size else token

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Special tokens have none, nor have ids of the model that the tokenizer does not name.

        Raises PromptError for an id outside the vocabulary.
        """
        for token_id in ids:
            self._check(token_id)
        return self._decode(ids)

    def _decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        decode = self._library.decode
        text: str = _call("cannot decode these tokens", decode, list(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, of part of a character too; those of its name for an added token.

        Ids of the model that the tokenizer does not name have none. Raises PromptError for one outside the vocabulary.
        """
        self._check(token_id)
        token = self._library.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._added:
            return token.encode()
        if BYTE_TOKEN.fullmatch(token) and not self._byte_letters:
            return bytes([int(token[3:5], 16)])
        if self._byte_letters:
            return bytes(self._byte_letters[letter] for letter in token)
        return token.replace(WORD_BEGIN, " ").encode()

    @cached_property
    def _byte_letters(self) -> dict[str, int]:
        """The byte of each letter in a byte-level vocabulary; empty for another kind.

        Printable letters of Latin-1 stand for their own bytes, letters from 256 on for the others in order.
        """
        decoder = self._library.decoder
        if decoder is None or b'"ByteLevel"' not in decoder.__getstate__():
            return {}
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        own = {letter: ord(letter) for letter in letters if ord(letter) < 256}
        others = [byte for byte in range(256) if byte not in own.values()]
        return own | dict(zip(letters[len(own) :], others, strict=True))

    def _token(self, token_id: int) -> str | None:
        """The token as `decode` sees it; None for one that it skips."""
        self._check(token_id)
        token = self._library.id_to_token(token_id)
        return None if token in self._special else token

    def _is_byte(self, token_id: int) -> bool:
        """Whether a token is a byte of its own, which is decoded together with those beside it."""
        return not self._byte_letters and bool(BYTE_TOKEN.fullmatch(self._library.id_to_token(token_id) or ""))

    def special_text(self, token_id: int) -> str:
        """The text that stands for a special token."""
        return str(self._library.id_to_token(token_id))

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            raise PromptError(f"token id {token_id} is not in the vocabulary", expected=f"0…{self._vocab_size - 1}")


class TextStream:
    """Turns ids into text one by one, never half a character; the parts joined are `decode` of all ids.

    Where the text goes on *after* ids of a prompt, the parts are what `decode` of all would add to the prompt's text.
    So a first word keeps the space before it, which decoders strip where a text begins; a special token at the end of
    the prompt does not change that. A character that the prompt leaves unfinished comes whole with its last token.

    (`tokenizers.decoders.DecodeStream` does not promise that: it never gives the bytes of an unfinished character,
    and raises or departs from `decode` where bytes turn out to be none.)

    What a token adds can depend on the token before it (its leading space) and, for a character made of several
    tokens, on those after it. So the ids not yet shown in full are *held*, and decoded after a *context* of shown ids:

    - byte-fallback tokens (`<0xE2>`): one bad byte makes replacement characters of the whole run, so a run is held
      until it ends;
    - byte-level tokens: an unfinished character at the end decodes to exactly one replacement character, so all but
      that one is final.

    A token costs the same however many came before it: no more is held, and no longer context kept, than is needed.

    `shown` are special tokens whose text is not left out.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[int] = (), *, after: Sequence[int] = ()) -> None:
        """Raises PromptError for ids outside the vocabulary at the end of `after`."""
        self._tokenizer = tokenizer
        self._shown = frozenset(shown)
        self._context: list[int] = []
        self._held: list[int] = []
        self._context_chars = 0
        self._shown_chars = 0
        """Characters of the held ids that were given out already."""
        if after:
            self._go_on(after)

    @classmethod
    def begun(cls, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        """The text of a prompt, up to a character that comes with the text after it."""
        held, end = cls(tokenizer, after=ids)._held, len(ids)
        if held and tokenizer._byte_letters:
            return tokenizer.decode(ids)[:-1]
        while held:
            end -= 1
            held = held[: len(held) - bool(tokenizer.token_bytes(ids[end]))]  # between them there may be ids without
        return tokenizer.decode(ids[:end])

    def _go_on(self, ids: Sequence[int]) -> None:
        """Hold the character that a prompt leaves unfinished; the context is the nearest token before it.

        A run of bytes that is finished is no context: bytes that follow would be decoded together with it.
        """
        tokenizer, pieces = self._tokenizer, list[tuple[int, bytes]]()
        named = (n for n in reversed(ids) if tokenizer.token_bytes(n))
        for token_id in islice(named, UNFINISHED):
            if tokenizer._token(token_id) is None:
                break
            pieces.insert(0, (token_id, tokenizer.token_bytes(token_id)))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(data for _, data in pieces))
        pending = len(decoder.getstate()[0])
        while pending > 0:
            token_id, data = pieces.pop()
            self._held.insert(0, token_id)
            pending -= len(data)
        before = islice((n for n in reversed(ids) if tokenizer.token_bytes(n)), len(self._held), None)
        plain = (n for n in chain(before, tokenizer.special_ids.values()) if not tokenizer._is_byte(n))
        self._context = list(islice(plain, 1))
        self._context_chars = len(self._decode(self._context))
        if tokenizer._byte_letters and self._held:
            self._shown_chars = len(self._held_text()) - 1

    def push(self, token_id: int) -> str:
        """Take the next id; returns the text that it completes, often "".

        Raises PromptError for an id outside the vocabulary.
        """
        token = self._tokenizer._token(token_id)
        if token is None:
            return self._special_text(token_id) if token_id in self._shown else ""
        self._held.append(token_id)
        if self._tokenizer._is_byte(token_id):
            return ""
        text = self._held_text()
        if text.endswith(REPLACEMENT) and self._tokenizer._byte_letters:
            part = self._show(text[:-1])
            if len(self._held) > 2 * UNFINISHED:
                self._drop_finished()
            return part
        part = self._show(text)
        self._end_context(text)
        return part

    def _end_context(self, text: str) -> None:
        """Make a context of what was held, whose text has been shown. It must have text of its own: where decoding
        strips a leading space, it must not be that of the next token."""
        for context in (self._held, self._context[-1:] + self._held):
            if alone := self._decode(context):
                self._context, self._context_chars = context, len(alone)
                break
        else:
            self._context, self._context_chars = self._context + self._held, self._context_chars + len(text)
        self._held, self._shown_chars = [], 0

    def _drop_finished(self) -> None:
        """Hold only what the unfinished character at the end is made of. What is cut before it is none by itself."""
        self._held, self._context, self._context_chars = self._held[-UNFINISHED:], [], 0
        self._shown_chars = len(self._held_text()) - 1

    def finish(self) -> str:
        """Return the rest when no id follows, with incomplete bytes as replacement characters."""
        return self._show(self._held_text()) if self._held else ""

    def _special_text(self, token_id: int) -> str:
        """The text that is held, and that of a special token: no character goes on beyond such a token."""
        rest = self.finish()
        self._held, self._shown_chars = [], 0
        return rest + self._tokenizer.special_text(token_id)

    def _held_text(self) -> str:
        return self._decode(self._context + self._held)[self._context_chars :]

    def _decode(self, ids: Sequence[int]) -> str:
        """The text of held ids, none of which is special, after a context, which may be a special token."""
        return self._tokenizer._decode(ids, skip_special=False)

    def _show(self, text: str) -> str:
        part = text[self._shown_chars :]
        self._shown_chars = max(self._shown_chars, len(text))
        return part


def _call(failure: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of the tokenizers library, whose errors have no class of their own."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # ValueError or a bare Exception, by version and cause
        raise ArtifactError(f"tokenizer.json {failure}", found=str(error)[:200]) from None
    except BaseException as error:
        # A panic of the Rust side arrives as pyo3's PanicException, which cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ArtifactError(f"tokenizer.json {failure}", found=str(error)[:200]) from None
