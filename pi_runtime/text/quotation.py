"""What a chat quotes is text: only its template writes markers.

A marker, such as `<|im_end|>`, that a user, a tool or a file says must not become the model's control token. So before
a template renders them, the texts of a chat are *cut* within each marker: behind its first character stands a *key*,
digits that nobody can guess and that every template leaves as they are. In the prompt the keys say where a quotation
was cut. They are taken out, and a marker over a cut is text, as if the tokenizer had no such token.

A marker may also be one only with what stands beside a text: a template that writes `<` and the name of a parameter, or
two parts of a message without a gap. So a text is cut too where it begins or ends with a piece of a marker, or is one.
Such a cut means nothing where no marker comes to stand over it.
"""

import os.path
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any, Self, SupportsIndex, TypeVar

from pi_runtime.errors import PromptError

ASSISTANT = "assistant"
_LOOKS_LIKE_MARKER = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_WORD = re.compile(r"[\w\s]*")
_LOOKED_FOR = re.compile(r"[.'\"]([A-Za-z_]\w*)")
_WITHIN = ("arguments", "parameters")
"""What the keys of these objects are is up to users and models."""
_SCHEMA = ("type", "properties", "items", "required", "enum", "description", "default", "title", "format")
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "text", "function")
"""Words by which the forms of messages and schemas are known: they stay whole, too."""
Cut = Callable[[str], str]
J = TypeVar("J")


class RenderedPrompt(str):
    """A prompt with quotations: a marker that has one of the `cuts` within it, or at its end, is text."""

    cuts: tuple[int, ...]
    """Positions behind characters that are quoted, rising."""
    said: int
    """Characters at the end that the assistant has said already: the answer goes on from them."""

    def __new__(cls, text: str, cuts: Iterable[int] = (), said: int = 0) -> Self:
        found = super().__new__(cls, text)
        found.cuts, found.said = (*cuts,), said
        return found

    def __add__(self, more: str) -> "RenderedPrompt":
        return RenderedPrompt(str(self) + more, self.cuts)

    def __radd__(self, before: str) -> "RenderedPrompt":
        return RenderedPrompt(before + str(self), (len(before) + cut for cut in self.cuts))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        is_beginning = isinstance(key, slice) and key.start in (None, 0) and key.step is None
        return RenderedPrompt(part, (cut for cut in self.cuts if cut <= len(part))) if is_beginning else part

    def with_key(self, key: str) -> str:
        """The text with a key at each cut."""
        text = str(self)
        return key.join(text[a:b] for a, b in pairwise([0, *self.cuts, len(text)]))


def parts_of(prompt: str) -> tuple[str, str]:
    """What stands before the assistant's text up to here, without the markers that are quoted there, and that text."""
    if not isinstance(prompt, RenderedPrompt):
        return prompt, ""
    at = len(prompt) - prompt.said
    return RenderedPrompt(str(prompt)[:at], (cut for cut in prompt.cuts if cut <= at)).with_key("\0"), str(prompt)[at:]


def markers_of(tokens: Mapping[str, bool], template: str) -> list[str]:
    """The added tokens that what is quoted must not become, of all, each with whether it is special.

    Those are control tokens, tokens that look like one, and others that the template writes. Blanks, words and single
    characters are a text's own, whoever writes them.
    """
    return [
        token
        for token, is_special in tokens.items()
        if len(token) > 1
        and not token.isspace()
        and (is_special or _LOOKS_LIKE_MARKER.fullmatch(token) or (token in template and not _WORD.fullmatch(token)))
    ]


def new_key() -> str:
    """A text that no request has, and that stays whole in any case, escape and code."""
    return str(secrets.randbelow(9 * 10**11) + 10**11)


class Quotation:
    """Cuts the texts of chats, and reads the prompts that a template makes of them."""

    def __init__(self, markers: Collection[str], template: str, kept: Collection[str] = ()) -> None:
        """`kept` are markers that an assistant's message may have, beside those that the template looks for in it."""
        looked_for = frozenset((*_LOOKED_FOR.findall(template), *_SCHEMA, *_TYPES))
        kept = {*kept, *(marker for marker in markers if _is_parsed(marker, template))}
        self._all = _Cutter(markers, looked_for)
        self._assistants = _Cutter([marker for marker in markers if marker not in kept], looked_for)

    def value(self, value: J, key: str) -> J:
        """A JSON value with its texts cut. Raises PromptError for one that is nested too deep."""
        found: J = _cut(value, lambda text: self._all.cut(text, key))
        return found

    def messages(self, messages: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
        """Messages with their texts cut. What is no message stays as it is. Raises PromptError as `value` does."""
        return [self._message(message, key) if isinstance(message, Mapping) else message for message in messages]

    def _message(self, message: Mapping[str, Any], key: str) -> dict[str, Any]:
        own = self._assistants if message.get("role") == ASSISTANT else self._all
        cuts: dict[str, Cut] = {
            "role": lambda text: self._all.cut(text, key, is_name=True),
            # What a model says in a call is JSON's text: its form has no markers within. Arguments are objects here, as
            # JSON written out may have markers in other letters.
            "tool_calls": lambda text: self._all.cut(text, key),
        }
        return {name: _cut(part, cuts.get(name, lambda text: own.cut(text, key))) for name, part in message.items()}

    def read(self, rendered: str, key: str, said: str = "") -> str:
        """The prompt without the key, and with what the assistant has `said` at its end.

        It is a `RenderedPrompt` where markers are quoted or something is said.
        """
        pieces = f"{rendered}{said}".split(key)
        text = "".join(pieces)
        cuts = self._all.effective(text, [*accumulate(map(len, pieces))][:-1])
        length = len(said.replace(key, ""))
        return RenderedPrompt(text, cuts, length) if cuts or length else text


class _Cutter:
    """Puts keys into texts, by a set of markers."""

    def __init__(self, markers: Collection[str], looked_for: Collection[str]) -> None:
        """`looked_for` are words by which a template knows what it is given: they stay whole."""
        self._looked_for, self._sorted = looked_for, sorted(markers)
        self._backward = sorted(marker[::-1] for marker in markers)
        self._joined = "\0".join(markers)
        self._longest = max(map(len, markers), default=0)
        self._starts = re.compile(f"(?=({_any_of(self._sorted)}))") if markers else None

    def cut(self, text: str, key: str, *, is_name: bool = False) -> str:
        """The text with a key behind the first character of each marker, whole or not; of whole ones only in names."""
        if self._starts is None or not text or text in self._looked_for:
            return text
        places = {found.start() for found in self._starts.finditer(text)}
        if not is_name:
            places |= {place for place in self._edges(text) if not text[place].isspace()}
        ends = [0, *(place + 1 for place in sorted(places)), len(text)]
        return key.join(text[a:b] for a, b in pairwise(ends))

    def _edges(self, text: str) -> Iterable[int]:
        """Where a text begins or ends with a piece of a marker."""
        for size in range(1, min(len(text) + 1, self._longest)):
            if _begins_any(text[len(text) - size :], self._sorted):
                yield len(text) - size
            if _begins_any(text[:size][::-1], self._backward):
                yield 0
        if len(text) < self._longest and text in self._joined:
            yield 0

    def effective(self, text: str, cuts: Sequence[int]) -> list[int]:
        """The cuts that a marker stands over, or ends at."""
        if not cuts or self._starts is None:
            return []
        found = dict[int, None]()
        for marker in self._starts.finditer(text):
            first, end = (bisect_right(cuts, place) for place in (marker.start(), marker.end(1)))
            found |= dict.fromkeys(cuts[first:end])
        return [*found]


def _cut(value: Any, cut: Cut) -> Any:
    try:
        return _walk(value, cut, within=False)
    except RecursionError as error:
        raise PromptError("messages, tools and variables of a chat must be JSON", found=str(error)[:200]) from None


def _walk(value: Any, cut: Cut, *, within: bool) -> Any:
    """A JSON value with its texts cut; keys only `within` what users and models make up."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, list | tuple):
        return [_walk(item, cut, within=within) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {}
    for name, item in value.items():
        is_within = within or name in _WITHIN
        found[cut(name) if within and isinstance(name, str) else name] = _walk(item, cut, within=is_within)
    return found


def _is_parsed(marker: str, template: str) -> bool:
    """Whether a template looks for a marker in what it is given."""
    name = re.escape(marker)
    tests = rf"['\"]{name}(?:\\n)*['\"]\s*(?:not\s+)?in\b"
    calls = rf"\.(?:r?split|r?partition|r?find|r?index|replace)\(\s*['\"]{name}"
    return marker in template and re.search(f"{tests}|{calls}", template) is not None


def _begins_any(text: str, words: Sequence[str]) -> bool:
    """Whether one of the sorted words begins with a text and goes on."""
    at = bisect_right(words, text)
    return at < len(words) and words[at].startswith(text)


def _any_of(words: Sequence[str]) -> str:
    """A pattern of the longest of sorted words; it branches where they part, so that many cost no more than one."""
    branches = []
    for _, group in groupby(filter(None, words), key=itemgetter(0)):
        same = [*group]
        shared = os.path.commonprefix(same)  # noqa: RUF071 - of texts, not of paths
        branches.append(re.escape(shared) + _any_of([word[len(shared) :] for word in same]))
    return f"(?:{'|'.join(branches)}){'?' * ('' in words)}" if branches else ""
