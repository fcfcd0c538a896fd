"""Tokenizer, chat template, end tokens and sampling defaults of a checkpoint, as an artifact stores them.

The reference is what transformers does with the checkpoint. The checkpoint's own code is never run.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer
from transformers.utils import logging

from pi_compile.checkpoint.config import read_json
from pi_compile.checkpoint.folder import CONFIG_FILE, GENERATION_FILE
from pi_compile.checkpoint.gguf.file import GgufFile
from pi_compile.checkpoint.gguf.tokenizer import gguf_tokenizer, split_notices
from pi_compile.errors import CheckpointError
from pi_runtime.artifact.schema import Text
from pi_runtime.errors import PiError

GENERATION_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TOKENIZER, TEMPLATE = "tokenizer.json", "chat_template.jinja"
_OTHER_FORMS = (("vocab.json", "merges.txt"), ("tokenizer.model",))
_PROBES = (
    "Hello world",
    " two  spaces, a\ttab\nand\r\n\nlines ",
    "Größe, naïve café — “quotes” … 3.14159 × 10⁻⁵",
    "日本語とрусский и עברית 🙂👍🏽",
    "def f(x):\n    return x ** 2  # <s> </s> <unk> [INST]",
)


@dataclass(frozen=True)
class TextFiles:
    """What an artifact stores to turn text into tokens and back."""

    text: Text
    files: Mapping[str, bytes]
    """Plain files of the artifact by name."""
    generation: Mapping[str, Any]
    notices: tuple[str, ...]


def read_text_files(
    location: Path, vocab_size: int, config: Mapping[str, Any], gguf: GgufFile | None = None
) -> TextFiles:
    """Read tokenizer, chat template, end tokens and sampling defaults of a checkpoint.

    `location` is the checkpoint's folder, or a GGUF file, `gguf`; nothing beside that file is read. `vocab_size` is the
    model's, and `config` has the fields of its config.json. Raises CheckpointError if there is no tokenizer, or if
    transformers or the runtime cannot read it.
    """
    with _faults_of_libraries(location):
        return _read(location, vocab_size, config, gguf)


@contextmanager
def _faults_of_libraries(location: Path) -> Iterator[None]:
    """Turn what transformers and tokenizers do on damaged files, which they do not check, into one error."""
    try:
        yield
    except PiError:
        raise
    except BaseException as error:
        # A panic of the Rust side arrives as pyo3's PanicException, which cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{location}: transformers cannot read the tokenizer",
            found=f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}",
            remedy=f"put a {TOKENIZER} there (saved where it does load), or install what is named: "
            "tokenizer.model needs `pip install sentencepiece protobuf`"
            if location.is_dir()
            else "use a GGUF file with a tokenizer of the kind llama or gpt2, or the Hugging Face checkpoint",
        ) from None


def _read(location: Path, vocab_size: int, config: Mapping[str, Any], gguf: GgufFile | None) -> TextFiles:
    notices = [] if gguf is None else split_notices(gguf)
    beside = location / GENERATION_FILE
    generation_config = read_json(beside) if gguf is None and beside.is_file() else None
    end_ids = _configured_end_ids(config, generation_config or {}, location)
    generation = _sampling_defaults(config if generation_config is None else generation_config, location)
    stored = _stored_tokenizer(location) if gguf is None else None
    tokenizer = _load(location, gguf)
    files = {TOKENIZER: _tokenizer_json(location, stored, tokenizer, notices)}
    template = _template(tokenizer, notices)
    if template is not None:
        files[TEMPLATE] = template.encode()
    if len(tokenizer) > vocab_size:
        notices.append(f"the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}: some have no meaning to it")
    in_text = ("bos_token", "eos_token")  # they have fields of their own
    special = {
        name: [str(t) for t in token] if isinstance(token, list | tuple) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if name not in in_text
    }
    text = Text(
        prefix_ids=_prefix_ids(tokenizer, vocab_size, location, notices),
        end_ids=_end_ids(end_ids, tokenizer, vocab_size, notices),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        special_tokens=special,
    )
    return TextFiles(text, files, generation, tuple(notices))


def _stored_tokenizer(folder: Path) -> bytes | None:
    if (folder / TOKENIZER).is_file():
        return (folder / TOKENIZER).read_bytes()
    if any(all((folder / name).is_file() for name in form) for form in _OTHER_FORMS):
        return None
    raise CheckpointError(
        f"{folder}: no tokenizer",
        expected=f"one of {TOKENIZER}, {', '.join(' with '.join(form) for form in _OTHER_FORMS)}",
        remedy="copy the tokenizer's files of the model into the folder",
    )


def _load(location: Path, gguf: GgufFile | None) -> Any:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers warns of model types that it does not know
    try:
        if gguf is None:
            tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=False, local_files_only=True)
        else:
            tokenizer = gguf_tokenizer(gguf)
    finally:
        logging.set_verbosity(verbosity)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(
            f"{location}: the tokenizer has no {TOKENIZER} form",
            found=type(tokenizer).__name__,
            expected=f"a {TOKENIZER}",
        )
    return tokenizer


def _tokenizer_json(folder: Path, stored: bytes | None, tokenizer: Any, notices: list[str]) -> bytes:
    """The stored tokenizer.json if it encodes text as transformers does, else the one that transformers writes."""
    made: bytes = tokenizer.backend_tokenizer.to_str().encode()
    if stored is None:
        return made
    try:
        plain = tokenizers.Tokenizer.from_buffer(stored)
    except Exception as error:
        raise CheckpointError(f"{folder / TOKENIZER}: not a tokenizer", found=error) from None
    # Files may have truncation and padding of a training run; a prompt is never truncated or padded.
    plain.no_truncation()
    plain.no_padding()
    if all(
        plain.encode(probe, add_special_tokens=False).ids == tokenizer.encode(probe, add_special_tokens=False)
        for probe in (*_PROBES, "a".join(tokenizer.all_special_tokens))
    ):
        return stored
    notices.append(
        f"{TOKENIZER} alone encodes text differently from transformers with its settings: the latter is packed"
    )
    return made


def _template(tokenizer: Any, notices: list[str]) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if "default" not in template:
            notices.append(f"no chat template is named default among {', '.join(sorted(template))}: none is packed")
        template = template.get("default")
    return template if isinstance(template, str) else None


def _prefix_ids(tokenizer: Any, vocab_size: int, folder: Path, notices: list[str]) -> tuple[int, ...]:
    """The tokens that transformers puts before a text by default; tokens after a text are not part of a prompt."""
    plain = tokenizer.encode(_PROBES[0], add_special_tokens=False)
    framed = tokenizer.encode(_PROBES[0])
    starts = [n for n in range(len(framed) - len(plain) + 1) if framed[n : n + len(plain)] == plain]
    if not plain or not starts:
        raise CheckpointError(
            f"{folder}: the tokenizer does not simply frame a text",
            expected="begin tokens, the tokens of the text, end tokens",
            found=f"{framed} for a text of tokens {plain}",
        )
    prefix, suffix = framed[: starts[0]], framed[starts[0] + len(plain) :]
    if suffix:
        notices.append(f"the tokenizer ends each text with {suffix}: prompts, which go on, are not ended")
    if any(i >= vocab_size for i in prefix):
        raise CheckpointError(
            f"{folder}: the tokenizer begins each text with {prefix}, which the model does not have",
            expected=f"ids below {vocab_size}",
            remedy="tokenizer and weights are of different models",
        )
    return tuple(prefix)


def _configured_end_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any], folder: Path) -> list[int]:
    """The end tokens of generation_config.json, then those of config.json, each once."""
    ids: dict[int, None] = {}
    for name, fields in ((GENERATION_FILE, generation_config), (CONFIG_FILE, config)):
        value = fields.get("eos_token_id")
        values: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
        for i in values:
            if type(i) is not int:
                raise CheckpointError(f"{folder / name}: eos_token_id", expected="token ids", found=repr(value))
            ids[i] = None
    return list(ids)


def _end_ids(configured: Sequence[int], tokenizer: Any, vocab_size: int, notices: list[str]) -> tuple[int, ...]:
    """The configured end tokens that are in the vocabulary, or the tokenizer's own; then those that have its name."""
    eos = tokenizer.eos_token_id
    ids = configured or ([] if eos is None else [eos])
    kept = [i for i in ids if 0 <= i < vocab_size]
    if len(kept) < len(ids):
        notices.append(f"end tokens {sorted(set(ids) - set(kept))} are outside the vocabulary: they are dropped")
    control = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    kept += sorted(i for i in (control[token] for token in named_ends(control)) if i < vocab_size)
    if not kept:
        notices.append("no end token is known: a generation ends only at its limit")
    return tuple(dict.fromkeys(kept))


def _sampling_defaults(fields: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The sampling defaults among the fields of generation_config.json; older checkpoints have them in config.json."""
    defaults = {key: fields[key] for key in GENERATION_KEYS if fields.get(key) is not None}
    for key, value in defaults.items():
        kinds: tuple[type, ...] = {"do_sample": (bool,), "top_k": (int,)}.get(key, (int, float))
        if type(value) not in kinds or not math.isfinite(value):
            raise CheckpointError(
                f"{folder}: generation default {key}",
                expected=" or ".join(kind.__name__ for kind in kinds),
                found=repr(value),
            )
    return defaults


_ENDS_OF_TEXT = """
    <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|>
    <|end_of_text|> </s> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <\uff5cend\u2581of\u2581sentence\uff5c>
"""
_ENDS_OF_FILES = """
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
"""Between files of which one is filled in, and behind the last."""
_NO_END_BESIDE = (
    ("<|end|>", {"<|return|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|call|>"}),
    ("<|end|>", {"<|flush|>", "<|calls|>"}),
    ("</s>", {"<|tool_response>"}),
    ("</s>", {"<|plamo:eos|>"}),
)
"""A token that is no end where all these are: gpt-oss ends a message by `<|end|>`, and Gemma 4 nothing by `</s>`."""


def named_ends(control: Collection[str]) -> set[str]:
    """Those of the control tokens that end a text."""
    found = set(control)
    no_ends = {token for token, others in _NO_END_BESIDE if others <= found}
    return found & {*_ENDS_OF_TEXT.split(), *_ENDS_OF_FILES.split()} - no_ends
