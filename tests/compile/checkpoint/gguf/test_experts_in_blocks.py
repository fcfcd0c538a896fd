"""Mixtures in K-quants: every expert's matrices are packed bit for bit, and run in memory and from disk alike."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from support.disk_models import within
from support.gguf_files import (
    random_blocks,
    rounded_checkpoint,
    write_byte_tokenizer,
    write_dequantised,
    write_gguf,
)
from support.small_project import no_progress

from pi_compile.checkpoint import open_checkpoint
from pi_compile.packing import ALL_KEPT, PackSpec, pack
from pi_compile.pipeline.packed import pack_model
from pi_compile.torch_model import decoder as td
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, active_parameters, parameters
from pi_runtime.errors import DeviceError
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
K, MLA = (Type.Q4_K, Type.Q4_K, Type.Q6_K), {"num_key_value_heads": 4, "head_dim": None, "num_hidden_layers": 3}
PIECES = {
    "deepseek-v3": ("deepseek-v3", MLA, (256, K), (512, (Type.Q4_K, Type.Q5_K, Type.Q8_0)), (768, K)),
    "as DeepSeek-V2-Lite": (
        "deepseek-v2",
        MLA,
        (128, (Type.Q4_K, Type.Q4_K, Type.Q5_0)),
        (256, K),  # blocks of `down` lie across the neurons of the two experts that it could be cut into
        (352, (Type.Q4_K, Type.Q4_K, Type.Q8_0)),
    ),
    "two dense layers, tables": (
        "deepseek-v3",
        {**MLA, "first_k_dense_replace": 2},
        (96, (Type.IQ4_XS, Type.Q4_K, Type.IQ4_NL)),
        (288, (Type.Q8_0, Type.Q6_K, Type.MXFP4)),
        (160, (Type.Q5_K, Type.IQ4_NL, Type.Q5_1)),
    ),
    "glm-4.5": ("glm4-moe", {"num_hidden_layers": 3}, (256, K), (256, (Type.Q8_0, Type.Q8_0, Type.Q8_0)), (1024, K)),
    "shared experts alone": (
        "glm4-moe",
        {"first_k_dense_replace": 0},
        (96, (Type.Q4_K, Type.Q4_K, Type.Q8_0)),
        (288, (Type.Q6_K, Type.Q6_K, Type.Q5_0)),
        (64, K),
    ),
    "dense layers alone": (
        "glm4-moe",
        {"n_shared_experts": 0, "num_hidden_layers": 3, "first_k_dense_replace": 2},
        (256, K),
        (0, K),
        (512, (Type.Q5_K, Type.Q5_K, Type.Q5_K)),
    ),
}
"""A family, its sizes, then F and the types of gate, up and down: of routed experts, of the shared one, and of dense
layers. What is shared and what is dense is one FFN in the file, whatever multiple of an expert it is."""
WHICH = ("_exps", "_shexp", "")


def blocks(kind: Type, rows: int, columns: int, seed: int) -> np.ndarray:
    return np.stack([random_blocks(kind, rows, columns, seed * EXPERTS + e) for e in range(EXPERTS)])


def in_pieces(folder: Path, case: str) -> tuple[Path, dict[str, str]]:
    """A mixture with shared experts or dense layers, and the names of the tensors of its FFNs by array."""
    name, sizes, *widths = PIECES[case]
    (routed, _), (shared, _), (dense, _) = widths
    experts = {"n_routed_experts": EXPERTS, "moe_intermediate_size": routed, "intermediate_size": dense, "n_group": 1}
    given = {"n_shared_experts": shared // routed, "first_k_dense_replace": 1, "topk_group": 1, **experts, **sizes}
    rounded_checkpoint(folder, name, "f16", **{**SIZES, **given})
    write_byte_tokenizer(folder)
    tensors: dict[str, tuple[np.ndarray, Type] | None] = {}
    arrays: dict[str, str] = {}
    for n in range(given.get("num_hidden_layers", SIZES["num_hidden_layers"])):
        is_dense = n < given["first_k_dense_replace"]
        for which, (width, kinds) in zip(WHICH, widths, strict=True):
            if is_dense != (which == ""):
                continue
            if width == 0:
                tensors |= dict.fromkeys(f"blk.{n}.ffn_{part}{which}.weight" for part in NAMES.values())
                continue
            for (own, part), kind in zip(NAMES.items(), kinds, strict=True):
                rows, columns = (D, width) if part == "down" else (width, D)
                found = blocks(kind, rows, columns, len(tensors))
                tensor = f"blk.{n}.ffn_{part}{which}.weight"
                tensors[tensor] = found if which == "_exps" else found[0], kind
                arrays[f"layers/{n}/ffn/{'shared_' if which == '_shexp' else ''}{own}"] = tensor
    write_gguf(folder, folder / "model.gguf", "f16", tensors=tensors)
    return folder / "model.gguf", arrays


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


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("case", PIECES)
def test_shared_experts_and_dense_layers_keep_their_blocks(tmp_path: Path, case: str) -> None:
    """They are matrices of their own width in the same artifact, each value that of GGUF's own dequantisation; and the
    model says what the same values by neuron say."""
    file, arrays = in_pieces(tmp_path, case)
    path, said = packed(file)
    assert ALL_KEPT in said
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with Artifact.open(path) as artifact:
        assert artifact.manifest.ffn_layout == "matrices"
        matrices = ("first", "up", "down")
        assert {n for n in artifact.manifest.arrays if "/ffn/" in n and n.endswith(matrices)} == arrays.keys()
        for name, tensor in arrays.items():
            found, of = artifact.values(name), stored[tensor]
            meant = gguf.dequantize(np.array(of.data), of.tensor_type)
            np.testing.assert_array_equal(found, meant.reshape(found.shape))
        wanted_TV = reference.forward(artifact, TOKENS, "dense")
    write_dequantised(file, tmp_path / "f32.gguf")
    checkpoint = open_checkpoint(tmp_path / "f32.gguf")
    by_neuron = pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, "f32")), tmp_path / "n.pi", recipe={})
    with load(path, device="cpu") as model, load(by_neuron.path, device="cpu") as cut:
        found_TV = model.logits(TOKENS)
        assert np.abs(found_TV - wanted_TV).max() < 2e-3 * np.abs(wanted_TV).max()
        exact_TV = cut.logits(TOKENS)
        assert np.abs(found_TV - exact_TV).max() < 3e-2 * np.abs(exact_TV).max()  # inputs are rounded beside blocks


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("case", ["mixtral", "odd width", "odd width, tables", *PIECES])
def test_bits_are_the_same_in_memory_and_from_disk(tmp_path: Path, case: str) -> None:
    path, _ = packed((in_pieces if case in PIECES else written)(tmp_path, case)[0])
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
    """By neuron where nothing is gained, or where one asks for it."""
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


@pytest.mark.parametrize("case", ["glm4-moe", "glm4-moe-biases", "deepseek-v2-groups"])
def test_torch_computes_the_same_of_both_layouts(tmp_path: Path, case: str) -> None:
    """And a gradient goes through."""
    rounded_checkpoint(tmp_path, case, "f16")
    found = []
    for layout in ("matrices", "neurons"):
        checkpoint = open_checkpoint(tmp_path).in_layout(layout)
        d, global_w = checkpoint.decoder, td.global_weights(checkpoint, "cpu")
        weights = [
            {name: w.requires_grad_() for name, w in layer.items()} for layer in td.stored_layers(checkpoint, "cpu")
        ]
        *_, (x_BTD,) = td.layers(d, weights, [td.embed(d, global_w, torch.tensor([TOKENS]))])
        logits = td.logits(d, global_w, x_BTD)
        logits.square().mean().backward()
        assert all(w.grad is not None for name, w in weights[-1].items() if "ffn/" in name and "bias" not in name)
        found.append(logits.detach())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5 * float(found[1].abs().max()))


@pytest.mark.parametrize("case", ["glm4-moe", "glm4-moe-biases", "deepseek-v2-groups"])
def test_matrices_of_floats_and_neurons_say_the_same(tmp_path: Path, case: str) -> None:
    rounded_checkpoint(tmp_path, case, "f16")
    write_byte_tokenizer(tmp_path)
    for layout in ("matrices", "neurons"):
        pack_model(str(tmp_path), tmp_path / f"{layout}.pi", layout=layout, progress=no_progress, notice=print)
    with load(tmp_path / "matrices.pi", device="cpu") as whole, load(tmp_path / "neurons.pi", device="cpu") as cut:
        assert whole.manifest.decoder == cut.manifest.decoder.uncut() != cut.manifest.decoder
        assert parameters(whole.manifest.decoder) == parameters(cut.manifest.decoder)
        assert active_parameters(whole.manifest.decoder) == active_parameters(cut.manifest.decoder)
        wanted_TV = cut.logits(TOKENS)
        assert np.abs(whole.logits(TOKENS) - wanted_TV).max() < 1e-4 * np.abs(wanted_TV).max()
