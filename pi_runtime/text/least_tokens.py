"""How many tokens a text has at least, by its length alone: so what cannot fit is refused before it is tokenized.

No token stands for more bytes than the longest one has. That says something only of a tokenizer that leaves nothing
out of a text. One whose kind may do so is not bounded: its texts have at least 0 tokens.
"""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

SHRINKING = {"ByteLevel": 1, "Prepend": 1, "NFC": 4}
"""Steps before tokens are looked for, and how many times shorter they may make a text, in bytes. Composing makes one
character of several: of a base of three bytes and marks that have nine in all, and three remain."""
KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
"""Ways to divide a text that leave nothing out, unless they say so."""
WHITE_SPACE = "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class LeastTokens:
    """The least number of tokens of a text, by one tokenizer."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        added = library.get_added_tokens_decoder().values()
        divider, normalizer = _settings(library.pre_tokenizer), _settings(library.normalizer)
        vocabulary = library.get_vocab(with_added_tokens=False)
        self._is_byte_level = "ByteLevel" in {step["type"] for step in [*_steps(divider), *_steps(normalizer)]}
        lengths = (len(token if self._is_byte_level else token.encode()) for token in vocabulary)
        self.longest = max([1, *lengths, *(len(token.content.encode()) for token in added)])
        """Bytes of the longest token, or more."""
        self._strips = any(token.lstrip or token.rstrip for token in added)
        """Whether white space beside some tokens is left out."""
        keeps = self._keeps(divider) and self._knows_every_byte(library.model, vocabulary)
        self._shrinks = _shrinking(normalizer) if keeps else None

    def __call__(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        if self._shrinks is None:
            return 0
        nbytes = len(text.encode("utf-8", "surrogatepass"))
        if self._strips:
            nbytes -= sum(text.count(space) * len(space.encode()) for space in WHITE_SPACE)
        return -(-nbytes // (self.longest * self._shrinks))

    @staticmethod
    def _keeps(divider: Mapping[str, Any] | None) -> bool:
        return all(step["type"] in KEEPING and step.get("behavior") != "Removed" for step in _steps(divider))

    def _knows_every_byte(self, model: Any, vocabulary: Mapping[str, int]) -> bool:
        """Whether the model has a token for each byte, so that every text has tokens and none of them is unknown."""
        if not isinstance(model, tokenizers.models.BPE):
            return False
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet() if self._is_byte_level else ()
        names = letters or [f"<0x{byte:02X}>" for byte in range(256)]
        return bool(self._is_byte_level or model.byte_fallback) and all(name in vocabulary for name in names)


def _settings(part: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return found


def _steps(settings: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as its steps."""
    if settings is None:
        return []
    if settings["type"] != "Sequence":
        return [settings]
    parts = [*settings.get("normalizers", ()), *settings.get("pretokenizers", ())]
    return [step for part in parts for step in _steps(part)]


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times shorter a text may become; None where nothing is known of that."""
    found = 1
    for step in _steps(normalizer):
        replaced = step.get("pattern", {}).get("String")
        if replaced is not None and len(step["content"].encode()) >= len(replaced.encode()):
            continue
        if step["type"] not in SHRINKING:
            return None
        found *= SHRINKING[step["type"]]
    return found
