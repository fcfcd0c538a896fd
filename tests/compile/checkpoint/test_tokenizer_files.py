"""Text becomes the same tokens in the artifact as in transformers; a notice says what cannot be kept."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tokenizers
from support.hf import edit_json, write_opt_tokenizer, write_tokenizer
from transformers import AutoTokenizer

from pi_compile.checkpoint import tokenizer_files
from pi_compile.checkpoint.config import read_json
from pi_compile.checkpoint.tokenizer_files import TextFiles, read_text_files
from pi_compile.errors import CheckpointError


class PanicException(BaseException):
    """Stands for pyo3's."""


PROMPTS = ["Once upon a time", " two  spaces\n", "café “quotes” 🙂", "it did</s>!", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the tokenizer files and configs of a Llama."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def opt_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "eos_token_id": 2}))
    write_opt_tokenizer(tmp_path)
    return tmp_path


def read(folder: Path, vocab_size: int = 400) -> TextFiles:
    return read_text_files(folder, vocab_size, read_json(folder / "config.json"))


def check_same_tokens(folder: Path, text: TextFiles) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = tokenizers.Tokenizer.from_buffer(text.files["tokenizer.json"])
    ours.no_truncation()
    ours.no_padding()
    for prompt in PROMPTS:
        ids = ours.encode(prompt, add_special_tokens=False).ids
        assert [*text.text.prefix_ids, *ids] == theirs(prompt)["input_ids"]


def test_a_stored_tokenizer_is_taken_as_it_is(folder: Path) -> None:
    text = read(folder)
    assert text.files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    assert text.text.prefix_ids == (1,)
    assert (text.text.bos_token, text.text.eos_token) == ("<s>", "</s>")
    assert text.text.special_tokens == {"unk_token": "<unk>"}
    assert text.notices == ()
    check_same_tokens(folder, text)


def test_a_tokenizer_of_another_form_is_converted(opt_folder: Path) -> None:
    text = read(opt_folder)
    assert text.text.prefix_ids == (2,)
    assert text.text.end_ids == (2,)
    assert text.text.special_tokens == {"unk_token": "</s>", "pad_token": "<pad>"}
    check_same_tokens(opt_folder, text)
    assert read(opt_folder) == text


def test_settings_of_a_training_run_do_not_cut_prompts(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    check_same_tokens(folder, read(folder))


def test_settings_beside_the_tokenizer_count(folder: Path) -> None:
    """A token that only tokenizer_config.json declares is one in the artifact too."""
    added = {"130": {"content": "time", "special": True, "lstrip": False, "rstrip": False, "normalized": False}}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added, extra_special_tokens=["time"])
    text = read(folder)
    check_same_tokens(folder, text)
    assert "the latter is packed" in text.notices[0]


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"model": {"type": "Unknown"}}'])
def test_a_broken_tokenizer(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "token" in str(caught.value)


@pytest.mark.parametrize("error", [Exception("untagged enum"), RecursionError("deep"), PanicException("slice index")])
def test_whatever_a_library_does_on_a_damaged_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tokenizer_files.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(CheckpointError, match="transformers cannot read the tokenizer") as caught:
        read(folder)
    assert str(error) in str(caught.value)


def test_an_interrupt_is_no_fault_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer_files.AutoTokenizer, "from_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(folder)


def test_a_broken_sentencepiece_model(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="transformers cannot read the tokenizer") as caught:
        read(folder)
    assert "pip install sentencepiece" in str(caught.value)


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    assert "the model 60" in read(folder, 60).notices[0]
    with pytest.raises(CheckpointError, match="which the model does not have"):
        read(folder, 1)


def test_a_suffix_is_said_and_left_out(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = read(folder)
    assert text.text.prefix_ids == (1,)
    assert text.notices == ("the tokenizer ends each text with [2]: prompts, which go on, are not ended",)


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (2, 5, (5, 2)),
        (2, [7, 2, 9], (7, 2, 9)),
        (None, 3, (3, 2)),
        (None, None, (2,)),
        (999, 3, (3, 2)),
    ],
)
def test_end_tokens_are_the_union(folder: Path, config: Any, generation: Any, ids: tuple[int, ...]) -> None:
    edit_json(folder / "config.json", eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert read(folder).text.end_ids == ids


def test_end_tokens_that_are_none(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id="</s>")  # noqa: S106 (no password)
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id"):
        read(folder)


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} ü"
NAMED = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "other"}]


@pytest.mark.parametrize("form", ["file", "config", "named"])
def test_the_chat_template_travels_inside(folder: Path, form: str) -> None:
    if form == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    else:
        edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE if form == "config" else NAMED)
    assert read(folder).files["chat_template.jinja"] == TEMPLATE.encode()


def test_no_chat_template(folder: Path) -> None:
    assert read(folder).files.keys() == {"tokenizer.json"}
    edit_json(folder / "tokenizer_config.json", chat_template=NAMED[1:])
    text = read(folder)
    assert text.files.keys() == {"tokenizer.json"}
    assert "no chat template is named default among tool_use" in text.notices[0]


def test_generation_defaults(folder: Path) -> None:
    edit_json(folder / "config.json", temperature=0.3)
    assert read(folder).generation == {"temperature": 0.3}
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50}
    fields = {**defaults, "repetition_penalty": None, "max_length": 20, "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(fields))
    assert read(folder).generation == defaults


@pytest.mark.parametrize(("key", "value"), [("temperature", "hot"), ("top_k", 1.5), ("do_sample", 1), ("top_p", True)])
def test_generation_defaults_that_cannot_be(folder: Path, key: str, value: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError, match=f"generation default {key}"):
        read(folder)
