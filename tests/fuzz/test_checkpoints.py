"""Checkpoints and GGUF files damaged by structure: read, or refused by an error with exit code and remedy."""

import json
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type
from support import hf
from support.families import random_checkpoint
from support.fuzz import mutations
from support.fuzz.cases import Cases
from support.fuzz.texts import SHORT, check, damaged_json
from support.gguf_files import random_blocks, rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.quantised_files import quantise

from pi_compile.checkpoint import open_checkpoint
from pi_compile.checkpoint.tokenizer_files import read_text_files
from pi_compile.pipeline.packed import pack_model
from pi_runtime.artifact.reader import Artifact
from pi_runtime.console import progress

pytestmark = pytest.mark.slow
GROUPED = {
    "attn_q": Type.Q5_K,
    "attn_output": Type.Q4_K,
    "ffn_gate": Type.Q4_K,
    "ffn_up": Type.Q4_K,
    "ffn_down": Type.Q6_K,
}
"""Types of square matrices, as llama.cpp's quantiser mixes them."""
TABLES = dict(zip(GROUPED, (Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.NVFP4, Type.IQ4_NL), strict=True))
BLOCKS = {"f16": {}, "q4_k_m": GROUPED, "tables": TABLES}


@pytest.mark.parametrize("form", ["", "gptq", "awq", "packed-zeros", "int8-zeros"])
def test_checkpoints(cases: Cases, tmp_path: Path, form: str) -> None:
    """Config, header of the weights, and index; quantised, the weights themselves too."""
    folder = tmp_path / "model"
    if form:
        hf.random_llama(folder, hidden_size=40, intermediate_size=84, num_attention_heads=4, num_key_value_heads=2)
        quantise(folder, form)
    else:
        random_checkpoint(folder, "qwen2")
    whole = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def damaged(rng: Random) -> str:
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        if rng.random() < 0.5:
            return damaged_json(rng, folder / "config.json", json.loads(whole["config.json"]))
        data = whole["model.safetensors"]
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        what = mutations.tree(rng, header)
        text = mutations.spelled(header)
        size = len(text) if rng.random() < 0.9 else rng.choice(mutations.INTEGERS[:-1]) % (1 << 64)
        (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data[8 + len(text) :])
        return f"header {what}"

    def read() -> None:
        checkpoint = open_checkpoint(folder)
        checkpoint.check_values() if form else checkpoint.digest()

    check(cases, SHORT, 0.5, damaged, read)


def test_tokenizer_files(cases: Cases, tmp_path: Path) -> None:
    """Transformers reads them, whose errors are many."""
    folder = tmp_path / "model"
    hf.random_llama(folder)
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    config = json.loads((folder / "config.json").read_text())
    whole = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}

    def damaged(rng: Random) -> str:
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        name = rng.choice(sorted(whole))
        return f"{name} {damaged_json(rng, folder / name, json.loads(whole[name]))}"

    check(cases, SHORT, 1, damaged, lambda: read_text_files(folder, 1000, config))


@pytest.mark.parametrize("form", BLOCKS)
def test_gguf_files(cases: Cases, tmp_path: Path, form: str) -> None:
    """What `pi-run FILE` packs. Header and metadata are mostly where damage is done: there are the numbers that others
    are computed from. Of blocks for whole matrices it is done as often among them: rows are cut, and scales are any
    numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    rounded_checkpoint(tmp_path / "model", "llama", "f16", **sizes if BLOCKS[form] else {})
    write_byte_tokenizer(tmp_path / "model")
    path = tmp_path / "whole" / "m.gguf"
    path.parent.mkdir()
    blocks = {f"blk.0.{n}.weight": (random_blocks(kind, 256, 256, 0), kind) for n, kind in BLOCKS[form].items()}
    write_gguf(tmp_path / "model", path, "f16", tensors=blocks)
    original, found = path.read_bytes(), tmp_path / "m.gguf"
    header = min(len(original), 24_000)
    starts = [original.index(data.tobytes()) for data, _ in blocks.values()]

    def damaged(rng: Random) -> str:
        data = original
        for _ in range(rng.choice((1, 1, 3))):
            head = mutations.data(rng, data[:header]) if rng.random() < 0.9 else data[:header]
            data = head + data[header:] if rng.random() < 0.9 else mutations.data(rng, head)
        if starts and rng.random() < 0.5:
            data = _in_blocks(rng, original, rng.choice(starts))
        found.write_bytes(data)
        return f"{len(data)} bytes"

    def read() -> None:
        packed = tmp_path / "packed.pi"
        try:
            pack_model(str(found), packed, progress=progress, notice=lambda _line: None)
            Artifact.open(packed).close()
        finally:
            packed.unlink(missing_ok=True)
            assert not list(tmp_path.glob(".packed*"))

    check(cases, SHORT, 0.5, damaged, read)


def _in_blocks(rng: Random, data: bytes, start: int) -> bytes:
    """A file with other bytes in the blocks of a tensor, numbers of groups that are none or extreme among them, or cut
    there."""
    if rng.random() < 0.2:
        return data[: start + rng.randrange(1 << 15)]
    found, numbers = bytearray(data), (0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x0001, 0x0000, 0x8000)
    for _ in range(rng.choice((1, 8))):
        at, number = start + 2 * rng.randrange(1 << 14), rng.choice((*numbers, rng.randrange(1 << 16)))
        found[at : at + 2] = number.to_bytes(2, "little")
    return bytes(found)
