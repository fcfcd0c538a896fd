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

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class QuotingTokens:
    """Encodes prompts with quotations."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        """Raises what `tokenizers` raises."""
        self._library = library
        self._key = "".join(secrets.choice(_LETTERS) for _ in range(12))
        self._added = sorted(library.get_added_tokens_decoder().items())
        self._names = {n: t.content for n, t in self._added if len(t.content) > 1 and not t.content.isspace()}
        model = library.model
        self._renamed, self._own_ids = self._with_new_names(model)
        makes_markers = any(token.id == n for n, name in self._names.items() for token in model.tokenize(name))
        if makes_markers or any(new != n and model.id_to_token(new) is not None for new, n in self._own_ids.items()):
            # Ordinary text would become a marker, or ids clash. A model of other words takes as long as a tokenizer.
            self._renamed, self._own_ids = self._with_new_names(tokenizers.Tokenizer.from_str(self._other_json()).model)

    def _with_new_names(self, model: Any) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer whose added tokens have new names, and the library's ids of those by this one's."""
        found, ids = tokenizers.Tokenizer(model), dict[int, int]()
        if self._library.normalizer is not None:
            found.normalizer = self._library.normalizer
        if self._library.pre_tokenizer is not None:
            found.pre_tokenizer = self._library.pre_tokenizer
        for n, token in self._added:
            name = self._new_name(token.content) if n in self._names else token.content
            found.add_tokens([tokenizers.AddedToken(name, **{flag: getattr(token, flag) for flag in _FLAGS})])
            made = found.token_to_id(name)
            assert made is not None
            ids[made] = n
        return found, ids

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
        return [self._own_ids.get(token_id, token_id) for token_id in encoded.ids]

    def _new_name(self, name: str) -> str:
        """It begins and ends as the old one does, for what stands beside a token may depend on that."""
        return f"{name[0]}{self._key}{name}"

    def _other_json(self) -> str:
        state = json.loads(self._library.to_str())
        _rename(state["model"], {name: self._new_name(name) for name in self._names.values()})
        bare = {**dict.fromkeys(state), "version": state["version"], "added_tokens": [], "model": state["model"]}
        return json.dumps(bare, ensure_ascii=False)


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
