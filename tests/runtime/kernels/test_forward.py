"""The compiled forward pass against the NumPy reference: families, formats, rungs, and token by token.

With q8 and q4 every product rounds its input to bytes. Where a quotient lies next to a half, the last bit of a float32
sum, which no two implementations share, decides a byte, and one byte is a thousand times such a bit. So short inputs
are looked for in which no byte hangs on that; there equality is as close as in float formats. Long inputs always have
such bytes: there kernels may differ from the reference by what it differs from itself when last bits change.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.long_form import marked_long
from support.rounding import blocks_of
from support.steps import step
from support.synthetic import FACTS, random_artifact, small_decoder

from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.kernels import reference

ODD = {"d_model": 44, "n_heads": 3, "n_kv_heads": 3, "head_dim": 10, "d_ff": 83, "n_layers": 3, "context_length": 160}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-odd": {**ODD, "n_kv_heads": 1},
    "llama-silu-tied-biases": {
        "activation": "silu",
        "tied_head": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    },
    "opt": {"family": "opt"},
    "opt-odd": {"family": "opt", **ODD},
    "opt-no-bias": {"family": "opt", "qkv_bias": False, "out_bias": False, "ffn_bias": False},
    "narrow-post-norm": {"family": "opt", **ODD, "block": "post-norm", "d_embedding": 20, "final_norm": False},
    "wide-embedding-tied": {"d_embedding": 150, "tied_head": True, "head_bias": True},
    "parallel-shared-norm": {
        **ODD,
        "n_kv_heads": 1,
        "block": "parallel",
        "shared_norm": True,
        "norm": "layer",
        "ffn": "plain",
        "activation": "gelu",
    },
    "parallel-partial-rotary": {
        "block": "parallel",
        "norm": "layer",
        "ffn": "plain",
        "activation": "gelu_tanh",
        "rotary_frequencies": (1.0, 0.03),
        "rotary_scale": 1.3,
        "head_bias": True,
        "qkv_bias": True,
        "out_bias": True,
        "ffn_bias": True,
    },
    "qk-norm-fatrelu": {**ODD, "n_kv_heads": 1, "qk_norm": True, "threshold": 0.05},
    "joint-qk-norm": {**ODD, "n_kv_heads": 1, "qk_norm": True, "joint_qk_norm": True},
    "reordered": {**ODD, "n_kv_heads": 1, "block": "reordered", "ffn_bias": True},
    "reordered-layer-norm": {"block": "reordered", "norm": "layer", "n_experts": 3, "d_ff": 29, "experts_per_token": 2},
    "embedding-scaled-and-normed": {"embedding_scale": 2.5, "embedding_norm": True, "d_embedding": 20},
    "positions-scaled-and-normed": {"family": "opt", "embedding_scale": 2.5, "embedding_norm": True},
    "logits-scaled-and-capped": {"logit_scale": 0.4, "logit_softcap": 1.5, "head_bias": True},
    "turned-back-without-rotation": {"rotary_frequencies": (-1.0, -0.03), "unrotated_layers": (1,)},
    "mamba2-parts-alone": {
        **FACTS["a mixer or an FFN alone, states of Mamba-2 without positions"],
        **ODD,
        "n_kv_heads": 1,
    },
    "shared-keys": {
        **FACTS["keys of earlier layers, a wider FFN there, an embedding of each layer"],
        "n_layers": 5,
        "shared_key_layers": (3, 4),
        "windowed_layers": (0, 2, 3),
    },
    "short-conv": {**FACTS["a short convolution"], **ODD, "n_kv_heads": 1},
    "relu2-plain": {"activation": "relu2", "ffn": "plain", "norm": "layer", "rotary_frequencies": (1.0,)},
    "inner-norms": {**ODD, "activation": "relu2", "inner_norms": True},
    "drelu": {**ODD, "activation": "drelu", "ffn_bias": True},
    "latents": {**ODD, "n_kv_heads": 1, "latent_rank": 37, "value_dim": 7, "rotary_frequencies": (1.0, 0.03)},
    "latents-of-queries": {
        "n_heads": 9,
        "n_kv_heads": 1,
        "head_dim": 10,
        "latent_rank": 33,
        "query_rank": 21,
        "rotary_frequencies": (1.0, 0.1, 0.03),
        "score_scale": 1.3,
        "qkv_bias": True,
        "out_bias": True,
    },
    "experts-of-groups": {
        "n_experts": 6,
        "experts_per_token": 2,
        "d_ff": 23,
        "router_normalised": False,
        "router_groups": 3,
        "router_groups_taken": 2,
        "router_group_top": 1,
        "router_scale": 1.7,
    },
    "experts": {"n_experts": 5, "experts_per_token": 2, "d_ff": 23, "activation": "silu"},
    "experts-unnormalised": {"n_experts": 5, "experts_per_token": 2, "d_ff": 23, "router_normalised": False},
    "experts-by-sigmoid": {"n_experts": 5, "experts_per_token": 3, "d_ff": 23, "router_score": "sigmoid"},
    "experts-routed-early": {"n_experts": 5, "experts_per_token": 2, "d_ff": 23, "router_early": True},
    "experts-routed-early-reordered": {
        "n_experts": 5,
        "experts_per_token": 2,
        "d_ff": 23,
        "router_early": True,
        "block": "reordered",
    },
    "experts-shared-and-dense": {
        **ODD,
        "n_kv_heads": 1,
        "context_length": 64,
        "n_experts": 5,
        "experts_per_token": 2,
        "d_ff": 23,
        "experts_shared": 1,
        "dense_layers": (0, 2),
        "dense_ff": 40,
        "router_score": "sigmoid",
        "router_choice_bias": True,
        "router_groups": 2,
        "router_scale": 1.7,
    },
    "experts-by-sigmoid-unnormalised": {
        "n_experts": 5,
        "experts_per_token": 3,
        "d_ff": 23,
        "router_score": "sigmoid",
        "router_normalised": False,
    },
    "sinks-and-biases-of-clamped-experts": {
        **ODD,
        "n_kv_heads": 1,
        "n_experts": 2,
        "experts_per_token": 2,
        "d_ff": 23,
        "activation": "clamped_swiglu",
        "ffn_bias": True,
        "expert_bias": True,
        "router_bias": True,
        "attention_sinks": True,
        "window": 37,
        "windowed_layers": (0, 2),
    },
    "window": {"context_length": 160, "window": 37, "windowed_layers": (1,)},
    "sandwich": {
        "block": "sandwich",
        "context_length": 160,
        "window": 37,
        "windowed_layers": (0,),
        "windowed_frequencies": (1.0, 0.5, 0.25, 0.125),
    },
    "two-sizes-of-heads": {
        "context_length": 160,
        "window": 37,
        "windowed_layers": (0,),
        "windowed_head_dim": 44,
        "windowed_kv_heads": 1,
        "windowed_frequencies": (1.0, 0.5, 0.25, 0.125, 0.1),
        "rotary_frequencies": (1.0, 0.03, 0.0, 0.0),
        "qk_norm": True,
    },
    "larger-heads-without-window": {
        "head_dim": 40,
        "joint_qk_norm": True,
        "qk_norm": True,
        "window": 9,
        "windowed_layers": (1,),
        "windowed_head_dim": 6,
        "windowed_kv_heads": 4,
        "windowed_frequencies": (1.0, 0.5),
        "output_gate": True,
    },
    "sandwich-layer-norm": {"block": "sandwich", "norm": "layer", "n_experts": 3, "d_ff": 29, "experts_per_token": 2},
    "experts-odd": {**ODD, "n_experts": 3, "experts_per_token": 1, "d_ff": 29, "activation": "drelu", "ffn_bias": True},
}


FLOATS, BYTES = ["f32", "f16", "bf16"], ["q8", "q4", "q5", "q4_1", "q4z"]
MODES = ("dense", "gate", "predicted")


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x, dtype=np.float64).mean()))


def both_ways(path: Path, mode: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits from blocks of tokens, and token by token."""
    with load(path, mode=mode) as model:
        block, cache = model.logits(ids), model.new_cache()
        steps = [step(model.executor, ids[t : t + 1], cache, select=True).logits_TV[0] for t in range(len(ids))]
    return block, np.stack(steps)


def artifact_of(name: str, fmt: str, folder: Path) -> tuple[Path, Any]:
    decoder = small_decoder(**DECODERS[name])
    return random_artifact(folder / "a.pi", decoder, format=fmt, ranks=[5] * decoder.n_layers), decoder


BOUND = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-3}
"""Beside weights of 16 bits keys and values are rounded to float16, some of them otherwise for a last bit: by 2⁻¹¹."""


EVERY_FLOAT = [(name, fmt) for name in DECODERS for fmt in FLOATS]
BUT_ONE = set(zip(DECODERS, itertools.cycle(FLOATS[1:]), strict=False))
"""One format of 16 bits, in turns: in the short form each decoder has the other."""


@pytest.mark.parametrize("case", marked_long(EVERY_FLOAT, BUT_ONE), ids="-".join)
def test_logits_equal_the_reference_and_token_by_token_equals_the_block(
    case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fmt = case
    path, decoder = artifact_of(name, fmt, tmp_path)
    length, margins = min(decoder.context_length, 131), Margins(monkeypatch)
    for mode in MODES:
        with Artifact.open(path) as artifact:
            ids, wanted = next(decided(artifact, mode, margins, length=length, quotient=0.0, score=1e-4))
        block, steps = both_ways(path, mode, ids)
        assert relative_error(block, wanted) < BOUND[fmt], mode
        assert relative_error(steps, wanted) < BOUND[fmt], mode


MIXED = {
    "floats": ("f32", {"layers/0/ffn/first": "bf16", "layers/1/ffn/rest": "f16", "layers/1/attention/out": "f16"}),
    "both": ("f16", {"layers/0/ffn/rest": "q8", "layers/1/ffn/first": "q4", "layers/1/attention/qkv": "q8"}),
    "blocks": ("q8", {"layers/0/ffn/first": "q4", "layers/1/ffn/rest": "q4", "layers/0/attention/out": "q4"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("name", ["llama", "opt", "experts"])
def test_matrices_with_formats_of_their_own(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt, matrices = MIXED[kind]
    decoder, margins = small_decoder(**DECODERS[name]), Margins(monkeypatch)
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, ranks=[5] * decoder.n_layers, matrices=matrices)
    for mode in MODES:
        with Artifact.open(path) as artifact:
            assert "formats.matrices" in artifact.manifest.features
            ids, wanted = next(decided(artifact, mode, margins))
        for found in both_ways(path, mode, ids):
            assert relative_error(found, wanted) < 1e-3, mode


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8", "q4_1"])
@pytest.mark.parametrize(
    "name",
    ["llama-silu-tied-biases", "parallel-shared-norm", "parallel-partial-rotary", "sandwich", "opt-odd", "shared-keys"],
)
def test_ffns_of_whole_matrices(name: str, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder(**{"activation": "silu"} | DECODERS[name])
    margins, layers = Margins(monkeypatch), (Layer(rung="dense"),) * decoder.n_layers
    path = random_artifact(tmp_path / "a.pi", decoder, format=fmt, layers=layers, ffn_layout="matrices")
    length = {} if fmt in BYTES else {"length": 40, "quotient": 0.0}
    with Artifact.open(path) as artifact:
        assert {"ffn_layout"} <= set(artifact.manifest.features)
        ids, wanted = next(decided(artifact, "dense", margins, **length))
    for mode in ("dense", "gate"):
        for found in both_ways(path, mode, ids):
            assert relative_error(found, wanted) < (1e-5 if fmt == "f32" else 1e-3), mode


@pytest.mark.parametrize("name", ["llama-silu-tied-biases", "parallel-shared-norm", "sandwich", "opt-odd"])
def test_ffns_of_dense_layers_as_matrices(name: str, tmp_path: Path) -> None:
    layers = (Layer(rung="threshold", threshold=0.1), Layer(rung="dense"), Layer(rung="predicted", rank=4))
    decoder = small_decoder(**{"activation": "silu"} | DECODERS[name] | {"n_layers": 3})
    ranks = [layer.rank for layer in layers]
    path = random_artifact(
        tmp_path / "a.pi", decoder, ranks=ranks, layers=layers, format="f16", profiled=True, ffn_layout="mixed"
    )
    ids = np.random.default_rng(3).integers(0, decoder.vocab_size, 64)
    with Artifact.open(path) as artifact:
        assert "ffn_layout.mixed" in artifact.manifest.features
        assert {name for name in artifact.manifest.arrays if name.endswith("/down")} >= {"layers/1/ffn/down"}
        wanted, exact = (reference.forward(artifact, ids, mode) for mode in ("predicted", "dense"))
    for mode, logits in {"auto": wanted, "predicted": wanted, "dense": exact}.items():
        for found in both_ways(path, mode, ids):
            assert relative_error(found, logits) < BOUND["f16"], mode


@pytest.mark.parametrize("name", ["llama-silu-tied-biases", "opt-odd", "drelu", "experts"])
def test_a_layer_on_each_rung_that_leaves_something_out(name: str, tmp_path: Path) -> None:
    layers = (Layer(rung="predicted", rank=6), Layer(rung="threshold", threshold=0.1), Layer(rung="predicted", rank=4))
    decoder = small_decoder(**{**DECODERS[name], "n_layers": 3})
    ranks = [layer.rank for layer in layers]
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=ranks, layers=layers, format="f16")
    ids = np.random.default_rng(3).integers(0, decoder.vocab_size, 64)
    with Artifact.open(path) as artifact:
        wanted, exact = (reference.forward(artifact, ids, mode) for mode in ("predicted", "dense"))
    assert relative_error(wanted, exact) > 1e-2
    for mode in ("auto", "predicted", "gate"):
        for found in both_ways(path, mode, ids):
            assert relative_error(found, exact if mode == "gate" else wanted) < BOUND["f16"], mode


class Margins:
    """Watches the reference: how far the nearest quotient is from a half, and the nearest score from zero."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rounded, self._scores = reference.rounded, reference.scores
        monkeypatch.setattr(reference, "rounded", self._watch_rounded)
        monkeypatch.setattr(reference, "scores", self._watch_scores)
        self.quotient = self.score = 1.0

    def _watch_rounded(self, x_TD: np.ndarray) -> np.ndarray:
        x_TBJ = blocks_of(x_TD)
        quotient = x_TBJ * 127 / np.maximum(np.abs(x_TBJ).max(-1, keepdims=True), 1e-30)
        self.quotient = min(self.quotient, float(np.abs(quotient - np.floor(quotient) - 0.5).min()))
        return self._rounded(x_TD)

    def _watch_scores(self, *arguments: Any) -> np.ndarray:
        found = self._scores(*arguments)
        self.score = min(self.score, float(np.abs(found).min()))
        return found


def decided(
    artifact: Artifact, mode: str, margins: Margins, *, length: int = 3, quotient: float = 1e-3, score: float = 1e-3
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Inputs, and their logits, in which neither a byte nor a selection hangs on a last bit."""
    for seed in range(2000):
        ids = np.random.default_rng(seed).integers(0, artifact.manifest.decoder.vocab_size, length)
        margins.quotient = margins.score = 1.0
        wanted = reference.forward(artifact, ids, mode)
        if margins.quotient > quotient and margins.score > score:
            yield ids, wanted


# Numbers that come from few integers have quotients that are halves: an embedding's that a product begins with.
EVERY_BLOCK = [
    (name, fmt)
    for name, d in DECODERS.items()
    for fmt in BYTES
    if fmt == "q8" or not (d.get("block") == "reordered" or "d_embedding" in d)
]
FEWER_BITS = [case for case in EVERY_BLOCK if case[1] != "q8"]
BUT_TWO = [case for n, case in enumerate(FEWER_BITS) if n % 4 != n // 4 % 4]
"""In the short form each decoder has q8 and another format; four in a row have all."""


@pytest.mark.parametrize("case", marked_long(EVERY_BLOCK, BUT_TWO), ids="-".join)
def test_decided_inputs_of_q8_and_q4(case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, fmt = case
    path, _ = artifact_of(name, fmt, tmp_path)
    margins = Margins(monkeypatch)
    for mode in ("gate", "predicted"):
        with Artifact.open(path) as artifact:
            ids, wanted = next(decided(artifact, mode, margins))
        for equal in MODES[: 2 if mode == "gate" else 0] or [mode]:
            block, steps = both_ways(path, equal, ids)
            # Sums in another order differ by their last bits: 32 of them, and twice as many behind two products more.
            assert relative_error(block, wanted) < 2.0 ** (-17 if "latents" in name else -18), equal
            # One token's rows are summed in 16-bit integers.
            assert relative_error(steps, wanted) < 2e-5, equal


@pytest.mark.parametrize("fmt", BYTES)
@pytest.mark.parametrize("name", ["llama", "opt-odd"])
def test_long_inputs_of_q8_and_q4(name: str, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sensitivity is measured: inputs of all products off by 2⁻²⁰ at random, sixteen times a last bit."""
    path, decoder = artifact_of(name, fmt, tmp_path)
    ids = np.random.default_rng(3).integers(0, decoder.vocab_size, min(decoder.context_length, 131))
    rng, original = np.random.default_rng(0), reference.rounded

    def disturbed(x_TD: np.ndarray) -> np.ndarray:
        return original(x_TD * (1 + 2.0**-20 * rng.standard_normal(x_TD.shape)).astype(np.float32))

    # Without predictors: one whose score is zero but for a last bit would change far more.
    with Artifact.open(path) as artifact:
        wanted = reference.forward(artifact, ids, "gate")
        monkeypatch.setattr(reference, "rounded", disturbed)
        others = max(rms(reference.forward(artifact, ids, "gate") - wanted) for _ in range(3))
    assert others < 0.01 * rms(wanted)
    for found in both_ways(path, "gate", ids):
        assert rms(found - wanted) < 1.5 * others
