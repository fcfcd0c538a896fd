"""Mixtures in K-quants: every expert's matrices are packed bit for bit, and run in memory and from disk alike."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
from gguf import GGMLQuantizationType as Type
from support.disk_models import within
from support.gguf_files import random_blocks, rounded_checkpoint, write_byte_tokenizer, write_gguf
from support.small_project import no_progress

from pi_compile.checkpoint import open_checkpoint
from pi_compile.packing import ALL_KEPT
from pi_compile.pipeline.packed import pack_model
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.errors import DeviceError, UsageError
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.kernels import reference

EXPERTS, D, NAMES = 5, 256, {"first": "gate", "up": "up", "down": "down"}
TOKENS = [5, 17, 3, 90, 41, 7, 7, 22, 60]
SIZES = {
    "hidden_size": D,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
}
CASES = {
    "mixtral": ("mixtral", {"num_local_experts": EXPERTS, "intermediate_size": 512}, 512, [Type.Q6_K, Type.Q4_K]),
    "qwen3-moe": ("qwen3-moe", {"num_experts": EXPERTS, "moe_intermediate_size": 768}, 768, [Type.Q5_K, Type.Q6_K]),
    "olmoe": ("olmoe", {"num_experts": EXPERTS, "intermediate_size": 256}, 256, [Type.Q4_K, Type.Q4_K]),
    "odd width": ("mixtral", {"num_local_experts": EXPERTS, "intermediate_size": 352}, 352, [Type.Q5_0, Type.Q8_0]),
    "odd width, tables": (
        "mixtral",
        {"num_local_experts": EXPERTS, "intermediate_size": 352},
        352,
        [Type.MXFP4, Type.IQ4_NL],
    ),
    "odd width, minima": ("qwen3-moe", {"num_experts": EXPERTS, "moe_intermediate_size": 96}, 96, [Type.Q5_1] * 2),
}
"""A family, its sizes, F, and the types of `down` by layer, as llama.cpp's quantiser mixes them."""


def blocks(kind: Type, rows: int, columns: int, seed: int) -> np.ndarray:
    return np.stack([random_blocks(kind, rows, columns, seed * EXPERTS + e) for e in range(EXPERTS)])


def written(folder: Path, case: str) -> tuple[Path, int]:
    name, sizes, d_ff, downs = CASES[case]
    rounded_checkpoint(folder, name, "f16", **SIZES, **sizes)
    write_byte_tokenizer(folder)
    tensors: dict[str, tuple[np.ndarray, Type]] = {}
    for n, down in enumerate(downs):
        shapes = {"gate": (d_ff, D, Type.Q4_K), "up": (d_ff, D, Type.Q4_K), "down": (D, d_ff, down)}
        for part, (rows, columns, kind) in shapes.items():
            tensors[f"blk.{n}.ffn_{part}_exps.weight"] = blocks(kind, rows, columns, n), kind
    write_gguf(folder, folder / "model.gguf", "f16", tensors=tensors)
    return folder / "model.gguf", d_ff


def packed(path: Path) -> tuple[Path, list[str]]:
    said: list[str] = []
    pack_model(str(path), path.with_suffix(".pi"), progress=no_progress, notice=said.append)
    return path.with_suffix(".pi"), said


@pytest.mark.parametrize("case", CASES)
def test_experts_keep_their_blocks(tmp_path: Path, case: str) -> None:
    """Each value is the one of GGUF's own dequantisation, and rows of whole groups take the bytes of the file."""
    file, d_ff = written(tmp_path, case)
    path, said = packed(file)
    assert ALL_KEPT in said
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    ours = theirs = 0
    with Artifact.open(path) as artifact:
        for n in range(2):
            for name, part in NAMES.items():
                tensor = stored[f"blk.{n}.ffn_{part}_exps.weight"]
                meant = gguf.dequantize(np.array(tensor.data), tensor.tensor_type)
                found = artifact.values(f"layers/{n}/ffn/{name}")
                np.testing.assert_array_equal(found, meant.reshape(found.shape))
                entries = (artifact.manifest.arrays[f"layers/{n}/ffn/{name}{end}"] for end in ("", "_scales"))
                ours, theirs = ours + sum(entry.nbytes for entry in entries), theirs + int(tensor.n_bytes)
        wanted_TV = reference.forward(artifact, TOKENS, "dense")
    assert d_ff % 256 or ours <= 1.03 * theirs
    with load(path, device="cpu") as model:
        assert np.abs(model.logits(TOKENS) - wanted_TV).max() < 2e-3 * np.abs(wanted_TV).max()


def results(path: Path, budget: str | None, threads: int) -> list[np.ndarray]:
    """Logits of a prompt, of tokens alone, and of two sequences in one step."""
    with within(path, budget, threads) as model:
        found, cache = [model.logits(TOKENS)], model.new_cache()
        found += [model.decode(token, cache)[0] for token in TOKENS[:4]]
        caches = [model.new_cache() for _ in range(2)]
        some = [
            SequenceStep(cache=cache, tokens=np.array(TOKENS[:count], np.int64), select=True)
            for cache, count in zip(caches, (1, 3), strict=True)
        ]
        return [*found, *(result.logits_TV for result in model.executor.step(some))]


@pytest.mark.parametrize("case", ["mixtral", "odd width", "odd width, tables"])
def test_bits_are_the_same_in_memory_and_from_disk(tmp_path: Path, case: str) -> None:
    path, _ = packed(written(tmp_path, case)[0])
    expected = results(path, None, 1)
    np.testing.assert_array_equal(expected[1], expected[0][0])  # alone as in a prompt
    np.testing.assert_array_equal(expected[5][0], expected[0][0])  # and beside another sequence
    for budget, threads in ((None, 2), ("least", 1), ("half", 2), ("all", 1)):
        for found, wanted in zip(results(path, budget, threads), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_a_device_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = packed(written(tmp_path, "olmoe")[0])
    with pytest.raises(DeviceError, match="whole matrices"):
        load(path, device="stand-in")


def test_which_layouts_a_mixture_has(tmp_path: Path) -> None:
    """By neuron where nothing is gained, or where one asks for it; never where an FFN is cut into experts."""
    checkpoint = open_checkpoint(written(tmp_path, "olmoe")[0])
    assert checkpoint.format("ffn") == "Q4_K"
    assert checkpoint.in_layout("matrices").format("ffn") == "q4_k"
    pack_model(str(tmp_path / "model.gguf"), tmp_path / "n.pi", layout="neurons", progress=no_progress, notice=print)
    with Artifact.open(tmp_path / "n.pi") as artifact:
        assert artifact.manifest.ffn_layout == "neurons"
        assert artifact.manifest.formats["ffn"] == "q8"
    write_gguf(tmp_path, tmp_path / "f16.gguf", "f16")
    pack_model(str(tmp_path / "f16.gguf"), tmp_path / "f.pi", progress=no_progress, notice=print)
    with Artifact.open(tmp_path / "f.pi") as artifact:
        assert artifact.manifest.ffn_layout == "neurons"


def test_an_ffn_that_is_cut_into_experts_stays_by_neuron(tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path, "glm4-moe", "f16")
    with pytest.raises(UsageError, match="cut into experts"):
        open_checkpoint(tmp_path).in_layout("matrices")
