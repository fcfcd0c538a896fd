"""A guess head: a decoder layer of its own that drafts tokens from what the model computed, in EAGLE-3's form.

    g_t = fc · [x_t of some layers]     where the model has run token t; else y of the step before
    y_t = layer(n₁(embedding of token t + 1) | n₂(g_t))    token t + 2 is among the most likely of  head · n₄(y_t)

The layer is  a = g + attention(n₁(e) | n₂(g)),  y = a + down · (silu(gate · n₃(a)) · (up · n₃(a))), with rms norms, and
keys and values of its own. `|` puts two vectors side by side. Source: Li et al. 2025, EAGLE-3 (arXiv 2503.01840).

Arrays, with C layers' states side by side, W the embedding's width, F neurons, S tokens of the short list:

    guess/fc [D, C·D]   …/embedding_norm [W]   …/hidden_norm [D]   …/qkv [(H+2G)·E, W+D]   …/out [D, H·E]
    …/ffn_norm [D]   …/gate [F, D]   …/up [F, D]   …/down [D, F]   …/norm [D]   …/head [S, D]   …/ids [S]

A guess layer: a layer behind a model's last one that drafts tokens (multi-token prediction), as DeepSeek-V3 has it.

    h_t = n(x_t)      x_t what leaves the model's last layer, n the model's final norm; or, where the model has not run
                      token t, the h of the step before
    g_t = fc · (n₁(embedding of token t + 1) | n₂(h_t))
    h_t+1 = n₃(block(g_t))    token t + 2 is among the most likely of  head · h_t+1

The block is a layer as the model's others are, which is in none of its lists of exceptions (`Decoder.of_layer`), with
keys and values of its own; embedding and head are the model's. `|` puts two vectors side by side. Source: DeepSeek-AI
2024 (arXiv 2412.19437), section 2.2; the order of the two vectors and the norms are those of the published weights.

Arrays, with W the embedding's width:

    guess/fc [D, W+D]   …/embedding_norm [W]   …/hidden_norm [D]   …/norm [D]
    guess/attention/…   guess/ffn/…            as those of a layer
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from pi_runtime.artifact.buffers import kv_page
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.footprint import POSITIONS
from pi_runtime.artifact.formats import WEIGHT_FORMATS
from pi_runtime.artifact.sizes import ArraySpec, layer_specs

PREFIX = "guess/"
"""What the names of a guess head's arrays begin with."""


@dataclass(frozen=True, kw_only=True)
class GuessHead:
    """Shape and function of a guess head; its model says the widths D and W."""

    states: tuple[int, ...]
    """Layers whose inputs it reads, in order; the number of layers stands for what leaves the last one."""
    format: str
    """Number format of its matrices."""
    shortlist: int
    """Tokens that it can draft."""
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    norm_eps: float
    rotary_frequencies: tuple[float, ...]
    """As those of a decoder."""
    rotary_scale: float = 1.0

    def layer_of(self, d: Decoder) -> Decoder:
        """Its layer as a decoder of one layer, beside a model, without what the model has besides: windows, latents."""
        return replace(
            d.without_exceptions().without("latent_rank", "output_gate"),
            n_layers=1,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            d_ff=self.d_ff,
            norm_eps=self.norm_eps,
            positions="rope",
            rotary_frequencies=self.rotary_frequencies,
            rotary_scale=self.rotary_scale,
        )

    def arrays(self, d: Decoder) -> Iterator[tuple[str, ArraySpec]]:
        """Its arrays beside a model, in the order in which they are written, scales apart."""
        width, heads, fmt = d.d_model, self.n_heads * self.head_dim, self.format
        qkv = heads + 2 * self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc": (width, len(self.states) * width),
            "embedding_norm": (d.d_embedding,),
            "hidden_norm": (width,),
            "qkv": (qkv, d.d_embedding + width),
            "out": (width, heads),
            "ffn_norm": (width,),
            "gate": (self.d_ff, width),
            "up": (self.d_ff, width),
            "down": (width, self.d_ff),
            "norm": (width,),
            "head": (self.shortlist, width),
        }
        for name, shape in shapes.items():
            yield PREFIX + name, ArraySpec(fmt if len(shape) > 1 else "f32", shape)
        yield f"{PREFIX}ids", ArraySpec("u32", (self.shortlist,))

    def problems(self, d: Decoder) -> Iterator[str]:
        """Yield what is impossible about it beside a model."""
        if not self.states or list(self.states) != sorted({n for n in self.states if 0 <= n <= d.n_layers}):
            yield f"guess.states: {self.states} are not layers of {d.n_layers} in order"
        if self.format not in WEIGHT_FORMATS:
            yield f"guess.format: {self.format!r} is none of {', '.join(WEIGHT_FORMATS)}"
        own_facts = {f.name for f in fields(self)}
        yield from (f"guess.{said}" for said in self.layer_of(d).problems() if said.partition(":")[0] in own_facts)
        page, own = kv_page(self.layer_of(d), "f32", 1).shape, (1, 2, self.n_kv_heads, POSITIONS, self.head_dim)
        if page != own:
            yield f"guess: a page of its cache holds {page} numbers, and its keys and values take {own}"
        if not 1 <= self.shortlist <= d.vocab_size:
            yield f"guess.shortlist: {self.shortlist} tokens of {d.vocab_size}"
        if not 0 < 2 * len(self.rotary_frequencies) <= self.head_dim or min(self.rotary_frequencies) <= 0:
            found = len(self.rotary_frequencies)
            yield f"guess.rotary_frequencies: {found} with head_dim {self.head_dim}, or not above 0"


def block_of(d: Decoder) -> Decoder:
    """Its block as a decoder of one layer, beside a model."""
    return replace(d.without_exceptions(), n_layers=1)


def guess_layer_arrays(d: Decoder, formats: Mapping[str, str], layout: str) -> Iterator[tuple[str, ArraySpec]]:
    """Its arrays beside a model, in the order in which they are written, scales apart."""
    yield f"{PREFIX}fc", ArraySpec(formats["attention"], (d.d_model, d.d_embedding + d.d_model))
    yield f"{PREFIX}embedding_norm", ArraySpec("f32", (d.d_embedding,))
    yield f"{PREFIX}hidden_norm", ArraySpec("f32", (d.d_model,))
    for name, spec in layer_specs(block_of(d), formats, None, False, layout):
        yield PREFIX + name, spec
    yield f"{PREFIX}norm", ArraySpec("f32", (d.d_model,))


def guess_layer_problems(d: Decoder) -> Iterator[str]:
    """Yield what is impossible about one beside a model."""
    if d.norm != "rms" or not d.final_norm or d.positions != "rope":
        yield f"guess_layers: 1 with norm {d.norm}, final_norm {d.final_norm}, positions {d.positions}"
