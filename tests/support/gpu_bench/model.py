"""A model of any size whose neurons fire as a published curve says, made on the GPU and kept in RAM.

The residual stream is random and changes from token to token. With r = down x, and rows of up and down scaled so that
z_i = up_i · r is a standard normal number, a neuron with bias −t_i fires with probability 1 − Φ(t_i). The gate matrix
is up · down, so up, down and the bias are its predictor.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.formats import Array
from pi_runtime.artifact.schema import ArrayEntry, Layer, Manifest, Text
from pi_runtime.artifact.sizes import PARTS, ArraySpec, array_specs, is_scales, scales_name
from support.gpu_bench.stored import dequantised, store
from support.paths import ROOT

CURVES = ROOT / "profiles" / "activations" / "published"
WRITE = 0.25
"""Deviation of what attention and FFN add to a coordinate of the residual, whose own deviation is about 1."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model to make."""

    name: str
    layers: int
    d_model: int
    d_ff: int
    heads: int
    vocabulary: int = 32000
    rank: int = 512
    context: int = 1024

    @property
    def decoder(self) -> Decoder:
        """A Llama with a gated ReLU FFN that has biases."""
        e = self.d_model // self.heads
        theta = np.float32(10000) ** (np.arange(0, e, 2, dtype=np.float32) / np.float32(e))
        return Decoder(
            family="llama", vocab_size=self.vocabulary, d_model=self.d_model, d_embedding=self.d_model,
            n_layers=self.layers, n_heads=self.heads, n_kv_heads=self.heads, head_dim=e, d_ff=self.d_ff,
            context_length=self.context, norm="rms", norm_eps=1e-5, positions="rope",
            rotary_frequencies=tuple((1 / theta).tolist()), ffn="gated", activation="relu", tied_head=False,
            qkv_bias=False, out_bias=False, ffn_bias=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A published curve of activations, and the fraction of neurons that fire."""

    name: str
    density: float
    source: str

    def frequencies(self, neurons: int) -> Array:
        """How often each neuron fires, hottest first: density × slope of the curve, at most 1; excess goes on."""
        return _frequencies(self, neurons)


@functools.cache
def _frequencies(curve: Curve, neurons: int) -> Array:
    lines = (CURVES / f"{curve.name}.csv").read_text(encoding="utf-8").splitlines()
    table = np.array([line.split(",") for line in lines if line[:1].isdigit()], float)
    share = table[:, 1:].mean(1) / 100
    share[0] = 0  # what a figure shows at 0 is the width of its line
    mass = np.diff(np.interp(np.linspace(0, 100, neurons + 1), table[:, 0], share)) * curve.density * neurons
    found, excess = np.sort(mass)[::-1].copy(), 0.0
    for n, wanted in enumerate(found.copy()):
        found[n] = min(1.0, wanted + excess)
        excess += wanted - found[n]
    found.flags.writeable = False
    return found


OPT = Curve("opt-30b", 0.03, "PowerInfer (SOSP'24), figure 4b and table 3: OPT, 3 % active")
REGLU = Curve("reglu-70b", 0.18, "PowerInfer (SOSP'24), figure 4b and table 3: ReGLU-LLaMA2-70B, 18 % active")
SEVEN = ModelSize("7B", 32, 4096, 11008, 32)
THIRTEEN = ModelSize("13B", 40, 5120, 13824, 40)
TINY = ModelSize("tiny", 2, 64, 192, 2, vocabulary=96, rank=32, context=128)


class MemoryArtifact:
    """Arrays in RAM and their manifest: what an executor asks of an open artifact."""

    def __init__(self, manifest: Manifest, arrays: Mapping[str, Array]) -> None:
        self.path, self.manifest, self._arrays = Path("in memory"), manifest, arrays

    def check_unchanged(self) -> None:
        """Nobody else has it."""

    def let_go(self) -> None:
        """There is no file behind it."""

    def array(self, name: str) -> Array:
        return self._arrays[name]

    def close(self) -> None:
        pass

    def with_curve(self, curve: Curve) -> "MemoryArtifact":
        """The same weights with the thresholds of a curve."""
        d = self.manifest.decoder
        normal = NormalDist()
        t_F = np.array([normal.inv_cdf(1 - min(max(f, 1e-5), 0.9999)) for f in curve.frequencies(d.d_ff)])
        bias_F = (-t_F).astype(np.float32)
        biases = {name: bias_F for name in self._arrays if name.endswith(("ffn/first_bias", "predictor/bias"))}
        return MemoryArtifact(self.manifest, {**self._arrays, **biases})


def manifest_of(size: ModelSize, fmt: str) -> Manifest:
    """The manifest of a model whose matrices are all in this format; the model need not exist."""
    d, formats = size.decoder, dict.fromkeys(PARTS, fmt)
    entries = {
        name: ArrayEntry(format=s.format, shape=s.shape, offset=0, nbytes=s.nbytes, sha256="")
        for name, s in array_specs(d, formats, [size.rank] * d.n_layers, profiled=False).items()
    }
    layers = (Layer(rung="predicted", rank=size.rank),) * d.n_layers
    return Manifest(
        decoder=d, formats=formats, layers=layers, profiled_tokens=0, text=Text(prefix_ids=(), end_ids=()),
        generation={}, recipe={}, provenance={}, arrays=entries, files={},
    )  # fmt: skip


def row_bytes(fmt: str, columns: int) -> int:
    """Bytes of one row of a matrix, scales included."""
    return ArraySpec(fmt, (1, columns)).nbytes_with_scales


def make_model(size: ModelSize, fmt: str, device: torch.device, seed: int = 0) -> MemoryArtifact:
    """A model in one format; every layer has weights of its own."""
    manifest, generator = manifest_of(size, fmt), torch.Generator(device=device).manual_seed(seed)
    d = manifest.decoder
    active = 0.05 * d.d_ff
    deviation = {
        "attention/out": WRITE * d.d_model**-0.5,
        "predictor/up": size.rank**-0.5,
        "embedding": 1.0,
    }
    arrays: dict[str, Array] = {}
    products: dict[str, torch.Tensor] = {}

    def put(name: str, w: torch.Tensor) -> None:
        stored, scales = store(fmt, w)
        arrays[name] = stored.cpu().numpy()
        if scales is not None:
            arrays[scales_name(name)] = scales.cpu().numpy()
        part = name.split("/", 2)[-1]
        if part.startswith("predictor/"):  # as what is stored means
            products[part] = dequantised(fmt, stored, scales, w.shape[-1])

    for name, spec in manifest.arrays.items():
        local = name.split("/", 2)[-1] if name.startswith("layers/") else name
        if spec.format == "f32":
            arrays[name] = np.full(spec.shape, 1.0 if "norm" in name else 0.0, np.float32)
        elif local != "ffn/first" and not is_scales(name):
            w = torch.randn(spec.shape, device=device, generator=generator) * deviation.get(local, d.d_model**-0.5)
            if local == "ffn/rest":
                w[:, 1] *= WRITE * (d.d_model / active) ** 0.5
            put(name, w)
        if local == "predictor/up":
            put(name.replace(local, "ffn/first"), products["predictor/up"] @ products["predictor/down"])
    return MemoryArtifact(manifest, arrays)


def in_f16(artifact: MemoryArtifact, size: ModelSize, device: torch.device) -> MemoryArtifact:
    """The same model in f16."""
    if artifact.manifest.formats["ffn"] == "f16":
        return artifact
    arrays: dict[str, Array] = {}
    for name, spec in artifact.manifest.arrays.items():
        if spec.format == "f32":
            arrays[name] = artifact.array(name)
        elif not is_scales(name):
            stored, scales = (torch.from_numpy(artifact.array(n)).to(device) for n in (name, scales_name(name)))
            arrays[name] = dequantised(spec.format, stored, scales, spec.shape[-1]).to(torch.float16).cpu().numpy()
    return MemoryArtifact(manifest_of(size, "f16"), arrays)
