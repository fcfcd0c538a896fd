"""Neurons inside experts of squared ReLU, at Nemotron-3 Nano's shape: dense, gate, predicted, and from disk.

nox -s bench -- disk --parts neurons [--densities 5,10,20,30] [--pattern MEM*E] [--formats q4] [--persistence 0.36]

The published shape with its first layers alone and a small vocabulary. How sparse the trained model is nobody has
published: densities are made up, by a recipe like that of `sparse_model`. A constant in every 32nd coordinate is what
thresholds are made of, and a neuron's row is made of its predictor's. All experts have the same rows, at places of
their own. Printed are tokens per second, and the bytes of experts that a token reads: by counted rows in memory, by the
reader from disk. From disk half and a quarter of the experts' rows are in memory, in one memory cgroup. llama.cpp
runs the same shape dense, in memory and mapped within the same limit.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from side_by_side.gguf_file import TYPES, random_matrix
from side_by_side.peers import PEERS
from side_by_side.process import EngineError, Worker
from side_by_side.rounds import LLAMA_CPP
from side_by_side.shape import CONFIGS
from sparse_model.activity import Calibrated, margins, norms, threshold_of
from sparse_model.matrices import CONSTANT, WRITE, Spec, Stored, constant_coordinates, neurons, store
from support.synthetic import bare_manifest, byte_tokenizer, random_values

from disk_tier.case import EMBEDDINGS, LIKENESS, OURS, Case
from disk_tier.limits import MemoryGroup
from pi_compile.checkpoint.config import Config, read_json
from pi_compile.checkpoint.families.registry import decoder_of
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS, ArraySpec, FfnBytes, array_specs, is_scales
from pi_runtime.artifact.writer import ArtifactWriter

CONFIG = CONFIGS / "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.json"
RANK, SAMPLE = 128, 64
Array = np.ndarray[Any, Any]


def nano(pattern: str) -> Decoder:
    """The published shape with these layers: M Mamba-2, E experts, * attention."""
    cut = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "vocab_size": EMBEDDINGS}
    return decoder_of(Config(CONFIG, {**read_json(CONFIG), **cut, "max_position_embeddings": 640}))


class SparseExperts(Case):
    """One format and one density inside experts."""

    def __init__(
        self, a: argparse.Namespace, fmt: str, density: float, folder: Path, group: MemoryGroup | None
    ) -> None:
        self._density = density
        super().__init__(a, fmt, folder, group, nano(a.pattern))

    def build(self) -> None:
        """Write the artifact."""
        d, rng, fixed = self.decoder, np.random.default_rng(0), constant_coordinates(self.decoder.d_model)
        formats = {**dict.fromkeys(PARTS, self.format), "predictor": "q4"}
        ranks = [RANK if n in d.ffn_layers else None for n in range(d.n_layers)]
        embedding_VD = _embedding(d, fixed)
        given, rows = {"embedding": embedding_VD}, self._rows(Spec(
            decoder=d, formats=formats, density=self._density, rank=RANK), embedding_VD, rng)  # fmt: skip
        with ArtifactWriter(self.path) as writer:
            for name, spec in array_specs(d, formats, ranks, profiled=False).items():
                short = name.split("/", 2)[-1]
                if is_scales(name):
                    continue
                if isinstance(matrix := rows.get(short), Stored):
                    matrix = matrix.rows(np.arange(spec.shape[0]) % len(matrix.stored))
                    writer.add_stored(name, spec, matrix.stored, matrix.scales)
                    continue
                values = given.get(name, matrix)
                values = _values(short, spec, fixed, rng) if values is None else values
                writer.add_array(name, spec, [np.broadcast_to(values, spec.shape)])
            writer.add_file("tokenizer.json", byte_tokenizer())
            writer.finish(bare_manifest(d, formats, ranks))

    def _rows(self, spec: Spec, embedding_VD: Array, rng: np.random.Generator) -> dict[str, Stored | Array]:
        """What experts have, by their short names: one expert's rows, a norm, and what predictors add to scores."""
        d, fixed = spec.decoder, constant_coordinates(spec.decoder.d_model)
        made = neurons(spec, fixed, rng)
        x_TD = embedding_VD[rng.integers(0, len(embedding_VD), SAMPLE)]
        normed_TD = x_TD / np.sqrt((x_TD * x_TD).mean(1, keepdims=True))
        first_FD = made["ffn/first"].values
        threshold = threshold_of(normed_TD, first_FD, fixed, spec.density)
        normed_TD[:, fixed] *= np.float32(threshold)
        z_TF = normed_TD @ first_FD.T
        score_TF = normed_TD @ made["predictor/down"].values.T @ made["predictor/up"].values.T
        margin = margins(Calibrated((threshold,), (z_TF > 0,), (score_TF,)), self.a.over_read)[0]
        h_TF = np.maximum(z_TF, 0) ** 2
        taken = d.router_scale + d.experts_shared
        rest_F1D = rng.standard_normal((d.d_ff, 1, d.d_model), np.float32)
        rest_F1D *= np.float32(WRITE / taken / np.sqrt((h_TF * h_TF).sum(1).mean()))
        rest_F1D[..., fixed] = 0
        return {
            **{name: made[name] for name in ("ffn/first", "predictor/down", "predictor/up")},
            "ffn/rest": store(self.format, rest_F1D),
            "predictor/bias": np.float32(margin),
            **norms(d.d_model, threshold),
        }

    @property
    def expert_bytes(self) -> float:
        """Bytes of experts, and of their predictors where these are asked, that a token of the last row read."""
        with Artifact.open(self.path) as artifact:
            neuron, layers = FfnBytes.of(self.decoder, artifact.manifest.formats), artifact.manifest.layers
        first, rest = self.rows[-1]["rows"]
        taken = self.decoder.experts_per_token * sum(neuron.predictor(layer.rank or 0) for layer in layers)
        return first * neuron.first + rest * neuron.rest + (taken if self.mode == "predicted" else 0)

    def dense_peer(self, tokens: int) -> float | None:
        """llama.cpp in memory; None where it fails."""
        try:
            with Worker(LLAMA_CPP, PEERS[LLAMA_CPP][0], limit_s=300) as worker:
                worker.ask("open_model", path=str(self.gguf), context=512)
                found = worker.ask("decode_text", tokens=self.text(4 + tokens, self.levels[0]), warm=4)
                return self._row("llama.cpp in memory", None, found)
        except EngineError as failure:
            print(f"  {failure}", flush=True)
            return None


def _embedding(d: Decoder, fixed: Array) -> Array:
    """(V, D): tokens whose ids follow each other are alike; the constant is in every one."""
    rng = np.random.default_rng(1)
    found_VD = rng.standard_normal((d.vocab_size, d.d_model), np.float32)
    for token in range(1, d.vocab_size):
        found_VD[token] = np.sqrt(1 - LIKENESS**2) * found_VD[token] + LIKENESS * found_VD[token - 1]
    found_VD[:, fixed] = CONSTANT
    return found_VD


def _values(name: str, spec: ArraySpec, fixed: Array, rng: np.random.Generator) -> Array:
    """Random values; nothing is written where the constant is, and routers do not see it."""
    values = random_values(name, spec, rng)
    if name == "attention/out":
        values *= np.float32(WRITE)
        values[fixed] = 0
    if name == "ffn/router":
        values[:, fixed] = 0
    return values


def write_dense(path: Path, d: Decoder, format_name: str) -> None:
    """The shape as a `nemotron_h_moe` of random weights, for llama.cpp."""
    rng, kind, layers = np.random.default_rng(0), TYPES[format_name], range(d.n_layers)
    inner, groups = d.state_heads * d.state_value_dim, d.state_key_heads
    channels, shared = inner + 2 * groups * d.state_key_dim, d.experts_shared * d.d_ff
    with_experts, attends = set(d.ffn_layers), set(layers) - {*d.ffn_layers, *d.recurrent_layers}
    writer = gguf.GGUFWriter(path, "nemotron_h_moe")
    sizes: dict[str, Any] = {
        "context_length": d.context_length, "embedding_length": d.d_model, "block_count": d.n_layers,
        "attention.head_count": d.n_heads, "attention.key_length": d.head_dim, "attention.value_length": d.head_dim,
        "ssm.conv_kernel": d.state_columns, "ssm.inner_size": inner, "ssm.state_size": d.state_key_dim,
        "ssm.time_step_rank": d.state_heads, "ssm.group_count": groups, "expert_count": d.experts_routed,
        "expert_used_count": d.experts_per_token - d.experts_shared, "expert_shared_count": 1,
        "vocab_size": d.vocab_size, "expert_feed_forward_length": d.d_ff,
        "expert_shared_feed_forward_length": shared, "expert_group_count": 1,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"nemotron_h_moe.{key}", value)
    writer.add_array("nemotron_h_moe.feed_forward_length", [d.d_ff * (n in with_experts) for n in layers])
    writer.add_array("nemotron_h_moe.attention.head_count_kv", [d.n_kv_heads * (n in attends) for n in layers])
    for key in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        writer.add_float32(f"nemotron_h_moe.attention.{key}", d.norm_eps)
    writer.add_float32("nemotron_h_moe.expert_weights_scale", d.router_scale)
    writer.add_bool("nemotron_h_moe.expert_weights_norm", d.router_normalised)
    writer.add_tokenizer_model("none")
    kinds: dict[str, dict[str, tuple[int, ...]]] = {
        "mamba": {
            "ssm_in": (inner + channels + d.state_heads, d.d_model), "ssm_out": (d.d_model, inner),
            "ssm_conv1d": (channels, d.state_columns), "ssm_conv1d.bias": (channels,), "ssm_dt.bias": (d.state_heads,),
            "ssm_a.": (d.state_heads, 1), "ssm_d.": (d.state_heads, 1), "ssm_norm": (groups, inner // groups),
        },
        "attention": {
            "attn_q": (d.n_heads * d.head_dim, d.d_model), "attn_k": (d.n_kv_heads * d.head_dim, d.d_model),
            "attn_v": (d.n_kv_heads * d.head_dim, d.d_model), "attn_output": (d.d_model, d.n_heads * d.head_dim),
        },
        "experts": {
            "ffn_gate_inp": (d.experts_routed, d.d_model), "exp_probs_b.bias": (d.experts_routed,),
            "ffn_up_exps": (d.experts_routed, d.d_ff, d.d_model),
            "ffn_down_exps": (d.experts_routed, d.d_model, d.d_ff), "ffn_up_shexp": (shared, d.d_model),
            "ffn_down_shexp": (d.d_model, shared),
        },
    }  # fmt: skip
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd": (d.vocab_size, d.d_model), "output": (d.vocab_size, d.d_model), "output_norm": (d.d_model,),
    }  # fmt: skip
    for n in layers:
        own = kinds["experts" if n in with_experts else "attention" if n in attends else "mamba"]
        tensors |= {f"blk.{n}.{name}": shape for name, shape in {"attn_norm": (d.d_model,), **own}.items()}
    for name, shape in tensors.items():
        full = name.removesuffix(".") if name.endswith(("bias", ".")) else f"{name}.weight"
        if len(shape) == 1 or shape[-1] % 32 or name.endswith(("gate_inp", "ssm_norm")):
            values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            writer.add_tensor(full, values + np.float32(("norm" in name) - name.endswith("ssm_a.")))
        else:
            writer.add_tensor(full, random_matrix(rng, shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(a: argparse.Namespace, fmt: str, folder: Path, group: MemoryGroup | None) -> list[dict[str, Any]]:
    """Print and return the figures of one format."""
    rows: list[dict[str, Any]] = []
    for density in (float(percent) / 100 for percent in a.densities.split(",")):
        case = SparseExperts(a, fmt, density, folder, group)
        d, peers = case.decoder, not a.no_llama
        if peers and not rows:
            write_dense(case.gguf, d, fmt)
        print(f"Nemotron-3 Nano's shape, {a.pattern}, {fmt}, density {density:g} (made up):", end=" ")
        print(f"{len(d.ffn_layers)} layers of {d.n_experts} experts, {d.experts_per_token} a token,", end=" ")
        print(f"D {d.d_model}, F {d.d_ff}; {case.path.stat().st_size / 1e9:.2f} GB", flush=True)
        for case.mode in ("dense", "gate", "predicted"):
            case.measure(f"in memory, {case.mode}", None, case.levels, a.tokens)
            first, rest = (n / (d.n_experts and d.experts_per_token * d.d_ff * len(d.ffn_layers))
                           for n in case.rows[-1]["rows"])  # fmt: skip
            print(
                f"    {case.expert_bytes / 1e6:.1f} MB of experts a token; {first:.3f} of the rows of `first`,", end=" "
            )
            print(f"{rest:.3f} of the neurons", flush=True)
        if peers and not rows:
            case.dense_peer(a.tokens)
        for percent in map(float, a.neuron_budgets.split(",")):
            budget = case.budget(percent)
            print(f" {percent:g} % of the experts, --ram-budget {budget} ({budget / 2**20:.0f} MiB)", flush=True)
            case.measure(OURS, budget, case.levels, a.tokens, ram_budget=budget)
            if peers and not rows and group is not None:
                case.llama(a.mapped_tokens)
        case.path.unlink()
        rows += [{**row, "density": density} for row in case.rows]
    (folder / f"{fmt}.gguf").unlink(missing_ok=True)
    return rows
