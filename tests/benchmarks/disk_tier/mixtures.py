"""Mixtures of experts from disk: ours within a budget, ours mapped and llama.cpp mapped, in one memory cgroup.

nox -s bench -- disk --parts mixtures [--mixtures SmallThinker-4B,Qwen3-MoE,small-SiLU] [--mixture-budgets 50,25,12.5]

Published shapes with fewer layers and a small vocabulary, random weights, and experts that are read whole. Routing is
synthetic (`disk_tier.routing`); its figures are printed beside published ones. llama.cpp runs both as a Qwen3-MoE, with
the same embeddings and routers. Of each budget are printed what was read, the share of experts that each policy would
have missed on the same text, and the rate that max(computing, bytes ÷ the device's rate at the size of the run's reads)
allows, with the seconds of the run in memory as computing.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side.gguf_file import write_gguf
from support.row_traces import Trace
from support.synthetic import bare_manifest, byte_tokenizer, random_values, small_decoder

from disk_tier.case import OURS, TRACED, WARM, Case
from disk_tier.limits import MemoryGroup
from disk_tier.prediction import Prediction
from disk_tier.residency import missed, steps_of
from disk_tier.routing import VOCABULARY, Routing, persistence_and_hot_list, text
from pi_compile.machine import Machine
from pi_runtime.artifact.rows import row_nbytes
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS, ArraySpec, array_specs, is_scales
from pi_runtime.artifact.writer import ArtifactWriter

_SMALL_THINKER = {
    "d_model": 1536, "d_ff": 768, "n_heads": 12, "n_kv_heads": 2, "n_experts": 32,
    "experts_per_token": 4, "activation": "relu", "router_early": True, "router_score": "sigmoid",
}  # fmt: skip
_QWEN3 = {
    "d_model": 2048, "d_ff": 768, "n_heads": 32, "n_kv_heads": 4, "n_experts": 128,
    "experts_per_token": 8, "activation": "silu", "qk_norm": True,
}  # fmt: skip
_SMALL_SILU = _QWEN3 | {"d_model": 1536, "n_heads": 12, "n_kv_heads": 2, "n_experts": 32, "experts_per_token": 4}
MIXTURES: dict[str, tuple[dict[str, Any], dict[str, float], dict[str, int]]] = {
    "SmallThinker-4B": (_SMALL_THINKER, {"common": 0.3, "subject": 0.1, "likeness": 0.3}, {"f16": 10, "q4": 32}),
    "Qwen3-MoE": (_QWEN3, {"common": 0.38, "subject": 0.1, "likeness": 0.35}, {"f16": 2, "q4": 6}),
    "small-SiLU": (_SMALL_SILU, {"common": 0.0, "subject": 0.0, "likeness": 0.3}, {"f16": 16, "q4": 40}),
}
"""Of each its shape, its routing, and its layers in each format, which make 2 to 4 GB. The last one's routing
follows the token alone: there is no hot list, which is the hardest case for any cache."""
PUBLISHED = "published 0.38, 0.38 and 0.89 (Qwen3)"
_TILE = 4096


class Mixture(Case):
    """One mixture in one format."""

    mapped_warm = WARM

    def __init__(self, a: argparse.Namespace, name: str, fmt: str, folder: Path, group: MemoryGroup | None) -> None:
        shape, routing, layers = MIXTURES[name]
        decoder = small_decoder(head_dim=128, vocab_size=VOCABULARY, context_length=640, n_layers=layers[fmt], **shape)
        self.routing = Routing(
            layers=decoder.n_layers, d_model=decoder.d_model, experts=decoder.n_experts,
            taken=decoder.experts_per_token, **routing,
        )  # fmt: skip
        super().__init__(a, fmt, folder, group, decoder)
        self.mode = "auto"
        self.levels = [0.38]

    def build(self) -> None:
        """Write the artifact, and llama.cpp's file unless it is left out."""
        d, embedding_VD, router_LXD = self.decoder, self.routing.embedding(), self.routing.routers()
        given = {"embedding": embedding_VD}
        given |= {f"layers/{n}/ffn/router": router_XD for n, router_XD in enumerate(router_LXD)}
        given |= {
            f"layers/{n}/ffn/counts": np.repeat(count_X, d.d_ff) for n, count_X in enumerate(self.routing.profiled())
        }
        formats, ranks = dict.fromkeys(PARTS, self.format), [None] * d.n_layers
        rng = np.random.default_rng(0)
        with ArtifactWriter(self.path) as writer:
            for name, spec in array_specs(d, formats, ranks, profiled=True).items():
                if not is_scales(name):
                    writer.add_array(name, spec, [given[name]] if name in given else _random(name, spec, rng))
            writer.add_file("tokenizer.json", byte_tokenizer())
            writer.finish(replace(bare_manifest(d, formats, ranks, 512), layers=(Layer(rung="dense"),) * d.n_layers))
        if not self.a.no_llama and self._group is not None:
            tensors = {"token_embd.weight": embedding_VD}
            tensors |= {f"blk.{n}.ffn_gate_inp.weight": router_XD for n, router_XD in enumerate(router_LXD)}
            write_gguf(self.gguf, d, self.format, given=tensors)

    def text(self, tokens: int, level: float = 0.0) -> list[int]:
        """A text on one subject; its persistence is the routing's own."""
        del level
        return text(tokens)

    @property
    def experts(self) -> list[Trace]:
        """The neurons that each layer needs, token by token."""
        taken_TLK = np.sort(self.taken_TLK[:TRACED], -1)
        neuron_TLKF = self.decoder.d_ff * taken_TLK[..., None] + np.arange(self.decoder.d_ff)
        return [list(neuron_TKF.reshape(len(taken_TLK), -1)) for neuron_TKF in neuron_TLKF.swapaxes(0, 1)]

    @property
    def routed(self) -> np.ndarray:
        """(L, X) how many of these tokens each layer's experts get."""
        taken_LTK, experts = self.taken_TLK[:TRACED].swapaxes(0, 1), self.decoder.n_experts
        return np.stack([np.bincount(taken_TK.ravel(), minlength=experts) for taken_TK in taken_LTK])

    def route(self) -> None:
        """Record which experts the model itself takes, and print what its routing is like."""
        with self.ours(mode=self.mode, ram_budget=self.budget(25)) as worker:
            found = worker.ask("routes", tokens=self.text(WARM + self.a.tokens))
        layers = self.decoder.n_layers
        taken_TLK = self.taken_TLK = np.array(found["taken"]).reshape(-1, layers, self.routing.taken)
        same, hot = persistence_and_hot_list(taken_TLK)
        line = f"  of a token's experts {same:.2f} were the token's before, {hot:.2f} are in the layer's hot list"
        if not self.decoder.router_early:
            ahead_TLK = np.array(found["ahead"]).reshape(len(taken_TLK), layers - 1, -1)
            named = (ahead_TLK[..., :, None] == taken_TLK[:, 1:, None, :]).any(-1).mean()
            line += f", {named:.2f} are named by the router one layer early"
        print(f"{line}; {PUBLISHED}", flush=True)


def _random(name: str, spec: ArraySpec, rng: np.random.Generator) -> Iterable[np.ndarray]:
    """Random values, of large arrays the same ones again and again."""
    rows = spec.shape[0]
    if rows <= _TILE:
        return [random_values(name, spec, rng)]
    tile = random_values(name, ArraySpec(spec.format, (_TILE, *spec.shape[1:])), rng)
    return _tiles(tile, rows)


def _tiles(tile: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    for first in range(0, rows, len(tile)):
        yield tile[: rows - first]


def measure(
    a: argparse.Namespace, name: str, fmt: str, folder: Path, group: MemoryGroup | None, machine: Machine | None
) -> list[dict[str, Any]]:
    """Print and return the figures of one mixture in one format."""
    case = Mixture(a, name, fmt, folder, group)
    d, (level,) = case.decoder, case.levels
    print(
        f"{name}, {fmt}: {d.n_layers} layers of {d.n_experts} experts, {d.experts_per_token} a token,"
        f" D {d.d_model}, F {d.d_ff}; {case.path.stat().st_size / 1e9:.2f} GB",
        flush=True,
    )
    case.route()
    if machine is not None:
        case.predictions = {
            level: Prediction(case.path, machine, case.experts, case.experts, case.routed) for level in case.levels
        }
    in_memory = case.measure("in memory, mapped", None, [level], a.tokens)[level]
    trace = steps_of(case.routing, case.taken_TLK[None])
    expert_nbytes = d.d_ff * sum(row_nbytes(d, fmt).values())
    for percent in map(float, a.mixture_budgets.split(",")):
        budget = case.budget(percent)
        print(f" {percent:g} % of the experts, --ram-budget {budget} ({budget / 2**20:.0f} MiB)", flush=True)
        rate = case.measure(OURS, budget, [level], a.tokens, ram_budget=budget)[level]
        row = case.rows[-1]
        found = missed(case.routing, trace, int(percent / 100 * d.n_layers * d.n_experts), WARM * d.n_layers)
        used = d.n_layers * d.experts_per_token * expert_nbytes
        row["missed"] = {policy: share * used for policy, share in found.items()}
        read = row["bytes_read"] / a.tokens
        print("    MB/token missed by " + ", ".join(f"{p} {n / 1e6:.1f}" for p, n in row["missed"].items()), end="")
        print(f"; read {read / 1e6:.1f}, {read / min(row['missed']['static'], row['missed']['LRU']):.2f} × the better")
        row["bound"] = 1 / max(1 / in_memory, read / row["ceiling"])
        print(f"    {rate / row['bound']:.2f} of what computing or reading allows ({row['bound']:.2f})", flush=True)
        if group is None:
            continue
        print(f"  ours took {case.taken / 2**20:.0f} MiB: mapped engines have as much", flush=True)
        mapped = case.measure("ours, mapped", case.taken, [level], a.mapped_tokens, slack=1.0)[level]
        peer = None if a.no_llama else case.llama(a.mapped_tokens)
        print(f"  {rate / mapped:.1f} × ours mapped", end="")
        print("" if peer is None else f", {rate / peer:.1f} × llama.cpp", flush=True)
    case.path.unlink()
    case.gguf.unlink(missing_ok=True)
    return case.rows
