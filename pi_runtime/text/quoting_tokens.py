"""Token ids of prompts with quotations: markers that a template wrote are tokens, those that it quotes are text.

A second tokenizer knows the added tokens by other *names*, which no text has; all else is the same. In the text that it
is given, a marker that counts stands by its new name, and one that is quoted by its old one, which is nothing but text.
So everything is encoded in one piece, and nothing before or behind a quotation changes.
"""

import json
import secrets
from typing import Any

import tokenizers

from pi_runtime.text.quotation import RenderedPrompt

_LETTERS = [chr(number) for number in range(0x12000, 0x12300)]
"""Of cuneiform: no normalizer changes them, and nothing divides a text between them and what follows."""


class QuotingTokens:
    """Encodes prompts with quotations."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        """Takes as long, and as much memory, as another tokenizer of its size. Raises what `tokenizers` raises."""
        self._library = library
        self._key = "".join(secrets.choice(_LETTERS) for _ in range(12))
        added = library.get_added_tokens_decoder()
        self._names = {
            token_id: token.content
            for token_id, token in added.items()
            if len(token.content) > 1 and not token.content.isspace()
        }
        self._renamed = tokenizers.Tokenizer.from_str(self._renamed_json())
        if any(self._renamed.token_to_id(self._new_name(name)) != n for n, name in self._names.items()):
            raise ValueError("its added tokens have other ids where they have other names")

    def ids(self, prompt: RenderedPrompt) -> list[int]:
        """The ids of a prompt."""
        key, text = self._key, prompt.with_key(self._key)
        (found,) = self._library.encode_batch([text], add_special_tokens=False)
        pieces, at = list[str](), 0
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            name, shown = self._names.get(token_id), text[start:end]
            # A key behind the last character: a quotation has completed the marker.
            if name is None or name not in shown or text.startswith(key, end) or start < at:
                continue
            pieces += [text[at:start].replace(key, ""), shown.replace(name, self._new_name(name), 1)]
            at = end
        pieces.append(text[at:].replace(key, ""))
        (encoded,) = self._renamed.encode_batch_fast(["".join(pieces)], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def _new_name(self, name: str) -> str:
        """It begins and ends as the old one does, for what stands beside a token may depend on that."""
        return f"{name[0]}{self._key}{name}"

    def _renamed_json(self) -> str:
        state = json.loads(self._library.to_str())
        names = {name: self._new_name(name) for name in self._names.values()}
        state["added_tokens"] = [
            {**token, "content": names.get(token["content"], token["content"])} for token in state["added_tokens"]
        ]
        state["post_processor"] = None
        _rename(state["model"], names)
        return json.dumps(state, ensure_ascii=False)


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give words of a model other names. They are then made of nothing, and nothing is made of them."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram's
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    else:
        model["vocab"] = {names.get(word, word): n for word, n in vocabulary.items()}
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            [left, right]
            for left, right in model["merges"]
            if not {left, right, left + right.removeprefix(prefix)} & names.keys()
        ]
