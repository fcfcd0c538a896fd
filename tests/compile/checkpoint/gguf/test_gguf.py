"""A GGUF file is the same model as the checkpoint it was made from."""

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import CASES, TYPES, rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.small_project import no_progress

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_compile.pipeline.packed import pack_plain
from pi_compile.pipeline.recipe_checkpoint import create_recipe
from pi_compile.recipe import read_recipe
from pi_runtime.artifact.quantisation import as_stored
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.kernels import reference

KINDS = [(case, "f16") for case in CASES] + [("llama", kind) for kind in ("f32", "bf16", "q8", "q4")]
KINDS += [("mixtral", "q8"), ("mixtral", "q4"), ("qwen3", "q4")]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """A Llama as a folder and as a file, in blocks of eight bits."""
    rounded_checkpoint(tmp_path / "hf", "llama", "q8")
    write_byte_tokenizer(tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", "q8")
    return tmp_path / "hf", tmp_path / "model.gguf"


def packed(checkpoint: Checkpoint, path: Path, fmt: str) -> dict[str, np.ndarray]:
    pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, fmt)), path, recipe={})
    with Artifact.open(path) as artifact:
        return {name: np.array(artifact.array(name)) for name in artifact.manifest.arrays}


@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_both_doors_lead_to_the_same_model(case: str, kind: str, tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path / "hf", case, kind)
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", kind)
    theirs, ours = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")
    wanted, found = vars(theirs.decoder), vars(ours.decoder)
    np.testing.assert_allclose(found["rotary_frequencies"], wanted["rotary_frequencies"], rtol=3e-7)
    assert {**found, "rotary_frequencies": ()} == {**wanted, "rotary_frequencies": ()}
    assert ours.array_shapes == theirs.array_shapes
    for array in ours.array_shapes:
        np.testing.assert_array_equal(ours.values(array), theirs.values(array), err_msg=array)
    parts = [part for part in PARTS if part != "predictor" and not (part == "head" and ours.decoder.tied_head)]
    assert {ours.format(part) for part in parts} == {kind}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = rounded_checkpoint(tmp_path / "hf", case, "f16")
    write_byte_tokenizer(tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", "f16")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    packed(checkpoint, tmp_path / "a.pi", "f32")
    ids = np.random.default_rng(0).integers(0, checkpoint.decoder.vocab_size, checkpoint.decoder.context_length)
    with Artifact.open(tmp_path / "a.pi") as artifact, torch.no_grad():
        found = reference.forward(artifact, ids)
        wanted = model(input_ids=torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(1), wanted.argmax(1))


def stored_tensors(file: Path) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    return {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in gguf.GGUFReader(file).tensors}


def assert_same_values(found: Path, wanted: Path) -> None:
    ours, theirs = open_checkpoint(found), open_checkpoint(wanted)
    assert ours.decoder == theirs.decoder
    for array in theirs.array_shapes:
        np.testing.assert_array_equal(ours.values(array), theirs.values(array), err_msg=array)


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """As llama.cpp stored them until 2024."""
    rounded_checkpoint(tmp_path / "hf", "mixtral", "f16")
    write_gguf(tmp_path / "hf", tmp_path / "whole.gguf", "f16")
    joined = {n: t for n, t in stored_tensors(tmp_path / "whole.gguf").items() if n.endswith("_exps.weight")}
    apart = {n.replace("_exps", f".{e}"): (row, kind) for n, (a, kind) in joined.items() for e, row in enumerate(a)}
    write_gguf(tmp_path / "hf", tmp_path / "old.gguf", "f16", tensors=dict.fromkeys(joined) | apart)
    assert_same_values(tmp_path / "old.gguf", tmp_path / "whole.gguf")


@pytest.mark.parametrize("case", ["llama-biases-tied", "qwen2"])
def test_queries_keys_and_values_in_one_tensor(case: str, tmp_path: Path) -> None:
    """What llama.cpp's converter writes with `--fuse-qkv`."""
    rounded_checkpoint(tmp_path / "hf", case, "f16")
    write_gguf(tmp_path / "hf", tmp_path / "whole.gguf", "f16")
    stored = stored_tensors(tmp_path / "whole.gguf")
    changes: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType] | None] = {}
    for first in [name for name in stored if ".attn_q." in name]:
        parts = [stored[first.replace("attn_q", f"attn_{part}")] for part in "qkv"]
        changes |= {first.replace("attn_q", f"attn_{part}"): None for part in "qkv"}
        changes[first.replace("attn_q", "attn_qkv")] = np.concatenate([a for a, _ in parts]), parts[0][1]
    write_gguf(tmp_path / "hf", tmp_path / "fused.gguf", "f16", tensors=changes)
    assert_same_values(tmp_path / "fused.gguf", tmp_path / "whole.gguf")


@pytest.mark.parametrize("kind", ["f16", "q8", "q4"])
def test_both_doors_pack_the_same_arrays(kind: str, tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path / "hf", "mixtral", kind)
    write_byte_tokenizer(tmp_path / "hf")
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", kind)
    theirs = packed(open_checkpoint(tmp_path / "hf"), tmp_path / "a.pi", kind)
    ours = packed(open_checkpoint(tmp_path / "model.gguf"), tmp_path / "b.pi", "keep")
    assert list(ours) == list(theirs)
    for name, stored in theirs.items():
        np.testing.assert_array_equal(ours[name], stored, err_msg=name)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-30, 12), kind=st.sampled_from(["q8", "q4"]))
def test_blocks_of_gguf_are_kept_exactly(seed: int, exponent: int, kind: str) -> None:
    """Every scale is kept, even one that binary16 holds with few bits or rounds to zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((3, 160)).astype(np.float32) * np.float32(2.0**exponent)
    values[1, 32:64], values[2, :32] = 0, np.round(values[2, :32])
    held = gguf.dequantize(gguf.quantize(values, TYPES[kind]), TYPES[kind])
    np.testing.assert_array_equal(as_stored(kind, held), held)


def test_an_end_of_the_model_in_six_bits(tmp_path: Path) -> None:
    """Files that were quantised to Q4_0 have an embedding in Q6_K."""
    rng, six_bits = np.random.default_rng(0), gguf.GGMLQuantizationType.Q6_K
    rounded_checkpoint(tmp_path / "hf", "llama", "q4", hidden_size=256, num_hidden_layers=1)
    blocks = rng.integers(0, 256, (307, 210), np.uint8)
    blocks[:, 208:] = rng.uniform(1e-4, 2e-4, (307, 1)).astype(np.float16).view(np.uint8)  # the scales
    write_gguf(tmp_path / "hf", tmp_path / "model.gguf", "q4", tensors={"output.weight": (blocks, six_bits)})
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert (checkpoint.format("embedding"), checkpoint.format("head")) == ("q4", "q6_k")
    np.testing.assert_array_equal(checkpoint.values("head"), gguf.dequantize(blocks, six_bits))


def test_only_the_rows_of_a_block_are_dequantised(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(both[1])
    seen: list[int] = []
    dequantize = gguf.dequantize
    monkeypatch.setattr("pi_compile.checkpoint.checkpoint.BLOCK_BYTES", 4 * 64 * 10)
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: seen.append(len(data)) or dequantize(data, kind))
    order = np.random.default_rng(0).permutation(96)
    for array, rows in (("embedding", None), ("layers/0/attention/qkv", None), ("layers/0/ffn/first", order)):
        values = np.concatenate(list(checkpoint.blocks(array, rows)))
        np.testing.assert_array_equal(values, open_checkpoint(both[0]).values(array, rows))
    assert max(seen) == 10


def test_text_and_end_tokens_are_those_of_the_file(both: tuple[Path, Path]) -> None:
    folder, file = both
    text = open_checkpoint(file).text_files
    ours = tokenizers.Tokenizer.from_buffer(text.files["tokenizer.json"])
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for prompt in ("once upon a time", " two  spaces\n\nGröße 日本", "</s>neuron<|im_end|>"):
        assert ours.encode(prompt).ids == theirs.encode(prompt).ids
        assert ours.decode(ours.encode(prompt).ids) == theirs.decode(theirs.encode(prompt).ids)
    assert text.text.prefix_ids == ()
    assert text.text.end_ids == (2, 3)
    assert (text.text.bos_token, text.text.eos_token) == ("<s>", "</s>")
    assert "m.content" in text.files["chat_template.jinja"].decode()
    assert text.generation == {}
    assert text.notices == ()
    assert ours.encode("<|endoftext|>").ids == theirs.encode("<|endoftext|>").ids  # what transformers adds


def test_nothing_beside_the_file_is_read(both: tuple[Path, Path]) -> None:
    _, file = both
    before, digest = open_checkpoint(file).text_files, open_checkpoint(file).digest()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        file.with_name(name).write_text("{")
    assert open_checkpoint(file).text_files == before
    assert open_checkpoint(file).digest() == digest


def test_a_begin_token(both: tuple[Path, Path]) -> None:
    folder, file = both
    write_gguf(folder, file, "q8", **{"tokenizer.ggml.add_bos_token": True})
    assert open_checkpoint(file).text_files.text.prefix_ids == (1,)


def test_a_sentencepiece_vocabulary(both: tuple[Path, Path]) -> None:
    """A tokenizer without merges, like that of Llama 2: they follow from the scores. Ids are those of llama.cpp."""
    folder, file = both
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words = ["▁", "o", "n", "c", "e", "on", "ce", "once", "▁once"]
    scores = [0.0] * len(pieces) + [-float(n) for n in range(len(words))]
    kind = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": None}
    lists = {"tokenizer.ggml.tokens": pieces + words, "tokenizer.ggml.scores": scores}
    kinds = {"tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words)}
    ids = {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eot_token_id": None}
    vocabulary = kind | lists | kinds | ids | {"tokenizer.ggml.add_bos_token": True}
    write_gguf(folder, file, "q8", **vocabulary)
    text = open_checkpoint(file).text_files
    found = tokenizers.Tokenizer.from_buffer(text.files["tokenizer.json"])
    assert found.encode("once é once", add_special_tokens=False).ids == [267, 259, 198, 172, 267]
    assert found.encode(" once</s>once", add_special_tokens=False).ids == [259, 267, 2, 267]
    assert found.decode([267, 259, 198, 172, 267]) == "once é once"
    assert (text.text.prefix_ids, text.text.end_ids) == ((1,), (2,))
    write_gguf(folder, file, "q8", **vocabulary, **{"tokenizer.ggml.add_space_prefix": False})
    found = tokenizers.Tokenizer.from_buffer(open_checkpoint(file).text_files.files["tokenizer.json"])
    assert found.encode("once once", add_special_tokens=False).ids == [266, 267]


def test_sampling_settings_are_taken_over(both: tuple[Path, Path]) -> None:
    folder, file = both
    write_gguf(folder, file, "q8", **{"general.sampling.temp": 0.7, "general.sampling.top_k": 20})
    assert open_checkpoint(file).text_files.generation == {"do_sample": True, "temperature": 0.7, "top_k": 20}


def test_from_file_to_artifact(both: tuple[Path, Path], tmp_path: Path) -> None:
    """init and pack, with the file named in the recipe, from the recipe's folder on."""
    _, file = both
    notices: list[str] = []
    create_recipe(str(file), tmp_path / "recipes.toml", notice=notices.append)
    assert read_recipe(tmp_path / "recipes.toml").model.path == "model.gguf"
    assert any("silu is taken" in line for line in notices)
    assert any("rounds it again" in line for line in notices)
    pack_plain(tmp_path / "recipes.toml", tmp_path / "a.pi", progress=no_progress, notice=notices.append)
    with Artifact.open(tmp_path / "a.pi") as artifact:
        assert artifact.manifest.formats["attention"] == "q8"
        assert artifact.manifest.provenance["checkpoint"]["digest"] == open_checkpoint(file).digest()


def test_a_folder_that_holds_just_one(both: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = both
    (tmp_path / "only").mkdir()
    shutil.copy(file, tmp_path / "only")
    (tmp_path / "only" / "config.json").write_text("{}")  # some put one beside
    found = open_checkpoint(tmp_path / "only")
    assert found.location == tmp_path / "only" / "model.gguf"
    assert found.digest() == open_checkpoint(file).digest()
    assert list(found.file_digests) == ["model.gguf"]


def test_weights_go_before_a_gguf_file_beside_them(both: tuple[Path, Path]) -> None:
    folder, file = both
    shutil.copy(file, folder)
    assert open_checkpoint(folder).location == folder
