"""The tokenizer of a GGUF file: vocabulary, merges and special tokens of its metadata.

Byte-level vocabularies are built here; SentencePiece's are as transformers reads them, whose reader also needs torch.
Which keys count, and their defaults, are llama.cpp's (`llama-vocab.cpp`).
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.checkpoint.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, REFUSED, PreTokenizer
from pi_compile.errors import CheckpointError

_BYTE_LEVEL = "gpt2"
_KEY = "tokenizer.ggml."
_TOKENS, _MERGES, _TYPES, _MODEL, _PRE = (_KEY + name for name in ("tokens", "merges", "token_type", "model", "pre"))
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_DEFAULT_IDS = {
    "llama": {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0},
    "t5": {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0},
}


class _Type(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def split_notices(file: GgufFile) -> list[str]:
    """What to say where a text may be cut into other tokens than those that the model was trained on."""
    name = file.metadata.get(_PRE)
    if file.metadata.get(_MODEL) != _BYTE_LEVEL or name in PRE_TOKENIZERS or name in REFUSED:
        return []
    found = f"{_PRE} = {name!r} is not known" if name else "the file names no pre-tokenizer"
    return [f"{found}: text is cut by the rule {DEFAULT!r} of llama.cpp, perhaps not as the model was trained"]


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The tokenizer, with its special tokens and chat template, that begins a text with BOS where the file's does.

    Raises CheckpointError for a byte-level vocabulary whose rule to split a text is known and not supported.
    """
    tokens = file.strings(_TOKENS) if _TOKENS in file.string_lists else []
    rule = _rule(file) if file.metadata.get(_MODEL) == _BYTE_LEVEL else None
    library = _sentencepiece(file, tokens) if rule is None else _byte_level(file, tokens, rule)
    special = _special_tokens(file, tokens)
    library.post_processor = None
    if "bos_token" in special and _begins_with_bos(file, rule):
        bos = special["bos_token"]
        token = {"id": "BOS", "ids": [library.token_to_id(bos)], "tokens": [bos]}
        library.post_processor = processors.TemplateProcessing(single=["BOS", "$A"], special_tokens=[token])
    template = file.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=library, chat_template=template, **special)


def _rule(file: GgufFile) -> PreTokenizer:
    name = file.metadata.get(_PRE) or DEFAULT
    if name in REFUSED:
        raise CheckpointError(
            f"{file.path}: {_PRE} = {name!r} is not supported",
            expected="tokens of bytes",
            found="tokens of letters",
            remedy="use the model's Hugging Face checkpoint, whose tokenizer.json says how a text is split",
        )
    return PRE_TOKENIZERS.get(name, PRE_TOKENIZERS[DEFAULT])


def _begins_with_bos(file: GgufFile, rule: PreTokenizer | None) -> bool:
    default = file.metadata.get(_MODEL) != "t5" if rule is None else rule.bos
    return bool(file.metadata.get(_KEY + "add_bos_token", default))


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    """Name → token. An id outside the vocabulary is as if its key were missing.

    An ordinary token is never the unknown or the padding token: its text would be lost.
    """
    types = _types(file, tokens)
    defaults = _DEFAULT_IDS.get(str(file.metadata.get(_MODEL)), {})
    found = {}
    for name, key in _SPECIAL_TOKENS.items():
        ids = (file.metadata.get(_KEY + key), defaults.get(key))
        token_id = next((i for i in ids if type(i) is int and 0 <= i < len(tokens)), None)
        if token_id is None:
            continue
        if name in ("bos_token", "eos_token") or types.get(tokens[token_id]) != _Type.NORMAL:
            found[name] = tokens[token_id]
    return found


def _types(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    return dict(zip(tokens, file.metadata.get(_TYPES) or [], strict=False))


def _found_whole(file: GgufFile, types: Mapping[str, int]) -> list[tokenizers.AddedToken]:
    """The tokens that are found in a text as they are written, whatever their letters.

    Those of Phi-3 take the blanks behind them, which only the model's name tells, as in llama.cpp.
    """
    name = str(file.metadata.get("general.name", "")).lower()
    takes_blanks = any(phi in name for phi in ("phi-3", "phi3"))
    return [
        tokenizers.AddedToken(
            token,
            normalized=False,
            special=kind != _Type.USER_DEFINED,
            rstrip=takes_blanks and token not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for token, kind in types.items()
        if token and kind in (_Type.UNKNOWN, _Type.CONTROL, _Type.USER_DEFINED)
    ]


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges whose tokens are there; a blank may be the first letter of one."""
    cuts = ((merge, merge.find(" ", 1)) for merge in file.strings(_MERGES))
    pairs = ((merge[:cut], merge[cut + 1 :]) for merge, cut in cuts if cut > 0)
    return [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary and a + b in vocabulary]


def _byte_level(file: GgufFile, tokens: list[str], rule: PreTokenizer) -> tokenizers.Tokenizer:
    if missing := [key for key in (_TOKENS, _MERGES) if key not in file.string_lists]:
        raise CheckpointError(f"{file.path}: no {', '.join(missing)}", remedy="convert the model again")
    vocabulary = {token: n for n, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary), ignore_merges=rule.whole)
    made = tokenizers.Tokenizer(model)
    splits, letter_splits = (
        [pre_tokenizers.Split(tokenizers.Regex(split), "isolated") for split in regexes]
        for regexes in (rule.splits, rule.letter_splits)
    )
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, letters, *letter_splits])
    made.decoder = decoders.ByteLevel()
    made.add_tokens(_found_whole(file, _types(file, tokens)))
    return made


def _sentencepiece(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """What `from_pretrained(gguf_file=…)` makes of it, but for spaces and for tokens that the file lacks."""
    stored: dict[str, Any] = {**file.metadata, _TOKENS: tokens}
    if _MERGES in file.string_lists:
        stored[_MERGES] = [" ".join(pair) for pair in _merges(file, {token: n for n, token in enumerate(tokens)})]
    keys = {name: f"tokenizer.{key}" for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items()}
    described = {name: stored[key] for name, key in keys.items() if key in stored}
    made, _ = convert_gguf_tokenizer(file.architecture, described)
    state, types = json.loads(made.to_str()), _types(file, tokens)
    vocabulary = made.get_vocab(with_added_tokens=False)
    # transformers adds special tokens that are ordinary ones of the file, or not in it, with ids beyond the model's.
    names = {token["content"] for token in state["added_tokens"]}
    kept = {token for token in names if token in vocabulary and types.get(token) not in set(_Type)}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in kept]
    if (state["pre_tokenizer"] or {}).get("type") == "Metaspace":
        # llama.cpp puts a space before every text, even one that begins with a space, or before none.
        adds_space = file.metadata.get(_KEY + "add_space_prefix", True)
        steps = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        state["normalizer"], state["pre_tokenizer"] = {"type": "Sequence", "normalizers": [*steps, space]}, None
    found = tokenizers.Tokenizer.from_str(json.dumps(state))
    found.add_tokens([token for token in _found_whole(file, types) if token.content in vocabulary])
    return found
