"""A guess layer: a layer behind a model's last one that drafts tokens (multi-token prediction), as DeepSeek-V3 has it.

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
from dataclasses import replace
from typing import Any

from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.sizes import ArraySpec, layer_specs


def block_of(d: Decoder) -> Decoder:
    """Its block as a decoder of one layer, beside a model."""
    names = "dense_layers", "unrotated_layers", "windowed_layers", "windowed_frequencies"
    lists: dict[str, Any] = dict.fromkeys(names, ())
    return replace(d.of_layer(d.n_layers), n_layers=1, dense_ff=0, window=0, **lists)


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
