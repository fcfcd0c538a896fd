"""Control tokens with a known name end a text: the list and its exceptions are llama.cpp's."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tokenizers
from support.gguf_vocabularies import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_level, sentencepiece, vocabulary
from support.hf import edit_json, write_tokenizer

from pi_compile.checkpoint.tokenizer_files import named_ends, read_text_files

FAMILIES = {
    "Llama 3": ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
    "ChatML, Qwen": ["<|im_end|>", "<|endoftext|>"],
    "Qwen Coder, Granite": ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_repo|>", "<fim_pad>", "<reponame>"],
    "Phi-3": ["<|end|>", "<|endoftext|>"],
    "gpt-oss": ["<|return|>", "<|call|>"],
    "Solar": ["<|flush|>", "<|calls|>"],
    "Gemma": ["<eos>", "<end_of_turn>"],
    "Gemma 4": ["<turn|>", "<|tool_response>"],
    "Llama 2, Mistral": ["</s>"],
    "DeepSeek": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "Kimi": ["[EOS]", "[EOT]", "[PAD]"],
    "MiniMax": ["[e~["],
    "Code Llama, Refact": ["<EOT>", "_<EOT>", "<REPO>", "<PAD>", "<fim-pad>", "<fim-repo>"],
    "SmolDocling": ["<end_of_utterance>"],
}
_OTHERS = """
    <|user|> <|assistant|> <|system|> <|im_start|> <start_of_turn> <|start|> <|message|> <|channel|> <|constrain|> <s>
    <bos> <unk> <pad> <|begin_of_text|> <|start_header_id|> <|observation|> <|eot_id| [INST] [/INST] <think> </think>
    <tool_call> <\uff5cUser\uff5c> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|IM_END|> <|python_tag|>
"""
NO_ENDS = _OTHERS.split()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ends_of_a_family(family: str) -> None:
    assert named_ends([*FAMILIES[family], *NO_ENDS]) == set(FAMILIES[family])


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        ("<|end|>", "<|end|>"),
        ("<|end|> <|return|>", "<|end|> <|return|>"),
        ("<|end|> <|call|>", "<|end|> <|call|>"),
        ("<|end|> <|return|> <|call|>", "<|return|> <|call|>"),
        ("<|end|> <|flush|> <|calls|>", "<|flush|> <|calls|>"),
        ("<|end|> <|flush|> <|call|>", "<|flush|> <|call|>"),
        ("<|end|> <|return|> <|flush|>", "<|end|> <|return|> <|flush|>"),
        ("</s> <turn|> <eos>", "</s> <turn|> <eos>"),
        ("</s> <turn|> <eos> <|tool_response>", "<turn|> <eos> <|tool_response>"),
        ("</s> <|plamo:eos|>", ""),
        ("", ""),
    ],
)
def test_a_name_that_is_no_end_beside_others(control: str, ends: str) -> None:
    assert named_ends(control.split()) == set(ends.split())


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, UNKNOWN, CONTROL])
@pytest.mark.parametrize(
    ("form", "token"),
    [
        *((byte_level, name) for names in FAMILIES.values() for name in names),
        *((sentencepiece, name) for name in ("<|im_end|>", "<end_of_turn>", "<|end|>")),
    ],
)
def test_an_ordinary_token_that_is_spelled_so_is_no_end(form: Any, token: str, kind: int) -> None:
    """In a GGUF file its type says so. The file's own ends stay, in their order."""
    file = form([(token, kind), ("<e>", CONTROL), ("<f>", CONTROL)])
    names = file.strings("tokenizer.ggml.tokens")
    own = [names.index("<f>"), names.index("<e>")]
    text = read_text_files(file.path, len(names), {"eos_token_id": own}, file).text
    others = {2} if form is sentencepiece else set()
    if kind in (CONTROL, UNKNOWN):
        others.add(names.index(token))
    assert text.end_ids == (*own, *sorted(others))


def test_an_end_that_is_an_ordinary_token_of_a_sentencepiece_vocabulary() -> None:
    """transformers has `</s>` for a special token in every one."""
    tokens = [("<bos>", CONTROL), ("<eos>", CONTROL), ("<unk>", UNKNOWN), ("\u2581", NORMAL), ("</s>", NORMAL)]
    keys = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2, "scores": [0.0] * 5, "model": "llama"}
    text = read_text_files(Path("model.gguf"), 5, {}, vocabulary(tokens, {}, **keys)).text
    assert (text.end_ids, text.prefix_ids) == ((1,), (0,))


@pytest.mark.parametrize("listed", [None, 5, [5, 7]])
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", ["<|im_end|>", "<|eot_id|>", "<|user|>"])
def test_the_ends_of_a_folder(tmp_path: Path, name: str, special: bool, listed: Any) -> None:
    """There the added tokens that are special are the control tokens. What is listed is never left out."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    write_tokenizer(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken(name, special=special)])
    library.save(str(tmp_path / "tokenizer.json"))
    if listed is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    edit_json(tmp_path / "config.json", eos_token_id=2)
    named = (library.token_to_id(name),) if special and name != "<|user|>" else ()
    first = () if listed is None else (5,) if listed == 5 else (5, 7)
    ends = read_text_files(tmp_path, 400, {"model_type": "llama", "eos_token_id": 2}).text.end_ids
    assert ends == (*first, 2, *named)
