"""The decoder in torch, layer by layer: the forward pass of profiling and training.

It has the equations of the definition (`pi_runtime/kernels/reference.py`), over batches of whole sequences, in
float32 throughout. One layer's weights are in memory at a time.

Shape letters: B sequences, T tokens each, N tokens of any sequence, D model width, H heads, E head width, X experts, F
neurons of one expert.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from pi_compile.checkpoint import Checkpoint
from pi_compile.errors import CorpusError
from pi_runtime.artifact.buffers import query_factors
from pi_runtime.artifact.decoder import CLAMP, LATENT_EPS, LENGTH_EPS, SWIGLU_SLOPE, Decoder
from pi_runtime.artifact.features import refuse_lacking
from pi_runtime.artifact.guess_head import PREFIX
from pi_runtime.artifact.sizes import SHARED
from pi_runtime.errors import DoesNotFitError

Tensor = torch.Tensor
NamedTensors = Mapping[str, Tensor]
"""Tensors by their artifact names."""
OnFfn = Callable[[int, int, NamedTensors, Tensor, Tensor], Tensor]
"""(layer, batch, the layer's weights, FFN inputs (B, T, D), neuron values (B, T, F)) → the values to go on with."""
Keys = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of layers by their windows."""
OnInput = Callable[[str, Tensor], None]
"""(name of a matrix of attention, its inputs (B, T, …))."""


def layer_weights(checkpoint: Checkpoint, layer: int, device: str) -> dict[str, Tensor]:
    """All arrays of one layer in the checkpoint's neuron order, named as in the artifact without `layers/N/`."""
    return {name: torch.from_numpy(v).to(device) for name, v in checkpoint.layer_values(layer).items()}


def stored_layers(checkpoint: Checkpoint, device: str) -> Iterator[NamedTensors]:
    """The weights of each layer, read when it is its turn."""
    return (layer_weights(checkpoint, n, device) for n in range(checkpoint.decoder.n_layers))


def global_weights(checkpoint: Checkpoint, device: str) -> dict[str, Tensor]:
    """Embedding, learned positions, final norm and head."""
    names = [name for name in checkpoint.array_shapes if not name.startswith(("layers/", PREFIX))]
    return {name: torch.from_numpy(checkpoint.values(name)).to(device) for name in names}


def embedding_weights(checkpoint: Checkpoint, device: str) -> dict[str, Tensor]:
    """Embedding and learned positions, which `embed` takes."""
    names = [
        name
        for name in checkpoint.array_shapes
        if name.startswith(("embedding", "positions", "layer_embedding")) and name != "embedding_out"
    ]
    return {name: torch.from_numpy(checkpoint.values(name)).to(device) for name in names}


def embed(d: Decoder, global_w: NamedTensors, ids_BT: Tensor) -> Tensor:
    """(B, T) ids → (B, T, D) hidden states, with positions from 0.

    Behind them stand the P numbers that each layer reads of its own embedding, where it has one: (B, T, D + L·P).
    """
    x_BTD = _embed(d, global_w, ids_BT)
    if not d.layer_embedding:
        return x_BTD
    shape = (*ids_BT.shape, d.n_layers, d.layer_embedding)
    made = F.linear(x_BTD, global_w["layer_embedding_in"]).view(shape) / d.d_model**0.5
    made = F.rms_norm(made, shape[-1:], global_w["layer_embedding_norm"], d.norm_eps)
    rows = global_w["layer_embedding"][ids_BT].view(shape) * d.layer_embedding**0.5
    return torch.cat([x_BTD, ((made + rows) * 0.5**0.5).flatten(2)], -1)


def _embed(d: Decoder, global_w: NamedTensors, ids_BT: Tensor) -> Tensor:
    x_BTD = global_w["embedding"][ids_BT]
    if d.d_embedding != d.d_model:
        x_BTD = F.linear(x_BTD, global_w["embedding_in"])
    x_BTD = x_BTD * d.embedding_scale
    if d.positions == "learned":
        x_BTD = x_BTD + global_w["positions"][d.position_offset : d.position_offset + ids_BT.shape[1]]
    return norm(d, global_w, "embedding_norm", x_BTD) if d.embedding_norm else x_BTD


def layers(
    d: Decoder,
    weights: Iterable[NamedTensors],
    states: Sequence[Tensor],
    on_ffn: OnFfn | None = None,
    on_input: OnInput | None = None,
    *,
    first: int = 0,
) -> Iterator[Sequence[Tensor]]:
    """Push batches of hidden states (B, T, D) through layers, all through one before the next; yields those after each.

    They are the model's layers from number `first` on. `on_ffn` sees what goes through each FFN, and may change it;
    `on_input` sees what goes into attention's matrices.
    """
    refuse_lacking(d, "torch")
    if first and d.shared_key_layers:
        raise DoesNotFitError("layers that read the keys of others run with these", found="decoder.shared_key_layers")
    states, keys = list(states), [Keys() for _ in states]
    for layer, w in enumerate(map(_by_neuron, weights), first):
        own, p = d.of_layer(layer), d.layer_embedding
        for batch, (state, kept) in enumerate(zip(states, keys, strict=True)):
            x_BTD, rows = state[..., : d.d_model], state[..., d.d_model :]
            if not own.has_ffn:
                normed = norm(d, w, "attention/norm", x_BTD)
                states[batch] = x_BTD + attention(own, w, normed, on_input)
                continue
            residual, inputs = before_ffn(own, w, x_BTD, on_input, kept)
            h = neurons(own, w, inputs)
            if on_ffn is not None:
                h = on_ffn(layer, batch, w, inputs, h)
            left = after_ffn(d, w, residual, ffn_output(w, h), rows[..., layer * p : (layer + 1) * p])
            states[batch] = torch.cat([left, rows], -1) if p else left
        yield states


def _by_neuron(w: NamedTensors) -> NamedTensors:
    """A layer's arrays, of whatever layout, with a row of `ffn/rest` for each neuron."""
    if "ffn/down" not in w:
        return w
    up, d_ff = [w["ffn/up"]] if "ffn/up" in w else [], w["ffn/down"].shape[1]
    down = w["ffn/down"].reshape(len(w["ffn/first"]) // d_ff, -1, d_ff).mT.reshape(len(w["ffn/first"]), -1)
    found = {**w, "ffn/rest": torch.stack([*up, down], 1)}
    if "ffn/shared_down" in w:
        last = _by_neuron({name: w[shared] for shared, name in SHARED.items() if shared in w})
        found |= {name: torch.cat([found[name], last[name]]) for name in ("ffn/first", "ffn/rest")}
    return found


def norm(d: Decoder, w: NamedTensors, name: str, x: Tensor) -> Tensor:
    """The layer's norm `name`, over the last axis."""
    weight = w[f"{name}/weight"]
    if d.norm == "layer":
        return F.layer_norm(x, weight.shape, weight, w[f"{name}/bias"], d.norm_eps)
    return F.rms_norm(x, weight.shape, weight, d.norm_eps)


def before_ffn(
    d: Decoder, w: NamedTensors, x_BTD: Tensor, on_input: OnInput | None = None, keys: Keys | None = None
) -> tuple[Tensor, Tensor]:
    """The first half of a block: the residual that the FFN's output is added to, and the FFN's input.

    The input is what neurons read; where the router reads something else, its values (…, X) stand behind it. Biases of
    the experts that a token takes, and without norms the FFN beside these, are in the residual already.
    """
    residual, inputs = _before_ffn(d, w, x_BTD, on_input, keys)
    read = x_BTD if d.router_early else inputs
    if d.router_norm:
        read = F.rms_norm(residual, (d.d_model,), w["ffn/router_norm"], d.norm_eps)
    if d.beside_ff and d.block == "sequential":
        residual = residual + _beside(d, w, inputs)
    if "ffn/experts_in" in w:
        inputs = F.linear(inputs, w["ffn/experts_in"])
    if d.router_apart and "ffn/router" in w:
        inputs = torch.cat([inputs, _router_values(w, read)], -1)
    if "ffn/expert_bias" in w:
        residual = residual + routing(d, w, inputs) @ w["ffn/expert_bias"]
    return residual, inputs


def input_width(d: Decoder) -> int:
    """Numbers of an FFN's input; see `before_ffn`."""
    return d.neuron_width + (d.experts_routed if d.router_apart else 0)


def _before_ffn(
    d: Decoder, w: NamedTensors, x_BTD: Tensor, on_input: OnInput | None, keys: Keys | None
) -> tuple[Tensor, Tensor]:
    if not d.has_mixer:
        return x_BTD, norm(d, w, "ffn/norm", x_BTD)
    if d.block == "post-norm":
        x_BTD = norm(d, w, "attention/norm", x_BTD + attention(d, w, x_BTD, on_input, keys))
        return x_BTD, x_BTD
    if d.block == "reordered":
        x_BTD = x_BTD + norm(d, w, "attention/norm", attention(d, w, x_BTD, on_input, keys))
        return x_BTD, x_BTD
    normed = norm(d, w, "attention/norm", x_BTD)
    if d.block == "sandwich":
        x_BTD = x_BTD + norm(d, w, "attention/out_norm", attention(d, w, normed, on_input, keys))
        return x_BTD, norm(d, w, "ffn/norm", x_BTD)
    attended = x_BTD + attention(d, w, normed, on_input, keys)
    if not d.shared_norm:
        normed = norm(d, w, "ffn/norm", x_BTD if d.block == "parallel" else attended)
    return attended, normed


def after_ffn(d: Decoder, w: NamedTensors, x_BTD: Tensor, y_BTD: Tensor, row_BTP: Tensor | None = None) -> Tensor:
    """The block's output, from the residual and the FFN's output, and what the layer reads of its own embedding."""
    left = _after_ffn(d, w, x_BTD, y_BTD)
    if d.layer_embedding and row_BTP is not None:
        h = activate_(d, F.linear(left, w["ffn/embedding_gate"])) * row_BTP
        left = left + norm(d, w, "ffn/embedding_norm", F.linear(h, w["ffn/embedding_out"]))
    return left * w["ffn/block_scale"] if d.block_scale else left


def _after_ffn(d: Decoder, w: NamedTensors, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
    if d.block == "reordered":
        return x_BTD + norm(d, w, "ffn/norm", y_BTD)
    if d.beside_ff and d.block == "sandwich":
        beside = _beside(d, w, F.rms_norm(x_BTD, (d.d_model,), w["ffn/beside_norm"], d.norm_eps))
        beside = F.rms_norm(beside, (d.d_model,), w["ffn/beside_out_norm"], d.norm_eps)
        y_BTD = F.rms_norm(y_BTD, (d.d_model,), w["ffn/experts_out_norm"], d.norm_eps) + beside
    if d.block == "sandwich":
        return x_BTD + norm(d, w, "ffn/out_norm", y_BTD)
    x_BTD = x_BTD + y_BTD
    return norm(d, w, "ffn/norm", x_BTD) if d.block == "post-norm" else x_BTD


def _beside(d: Decoder, w: NamedTensors, x: Tensor) -> Tensor:
    """What the FFN beside the experts gives."""
    h = activate_(d, F.linear(x, w["ffn/beside_first"]))
    return F.linear(h * F.linear(x, w["ffn/beside_up"]) if d.ffn == "gated" else h, w["ffn/beside_down"])


def activate_(d: Decoder, z: Tensor, threshold: float = 0.0) -> Tensor:
    """Apply the activation in place; magnitudes up to the model's threshold, or to `threshold`, become 0."""
    # In place: every further pass over (…, F) costs about a tenth of the product.
    match d.activation:
        case "relu" | "drelu":
            h = z.relu_()
        case "relu2":
            h = z.relu_().square_()
        case "silu":
            h = F.silu(z, inplace=True)
        case "clamped_swiglu":
            h = z.clamp_max_(CLAMP) * torch.sigmoid(SWIGLU_SLOPE * z)
        case gelu:
            h = F.gelu(z, approximate="tanh" if gelu == "gelu_tanh" else "none")
    limit = max(d.threshold, threshold)
    return h.masked_fill_(h.abs() <= limit, 0.0) if limit > 0 else h


def neurons(d: Decoder, w: NamedTensors, x: Tensor, threshold: float = 0.0) -> Tensor:
    """(…, D) normed FFN inputs → (…, X·F) neuron values h, which are 0 exactly where a neuron does not fire.

    With experts, each value is multiplied by the routing weight of its expert. Experts that the router does not take
    are not computed: their values are 0. Inner norms are part of the values, before any is left out.
    """
    if d.n_experts == 1:
        return _expert_neurons(d, w, x, threshold)
    widths = [d.d_ff] * d.experts_alike + [d.last_ff] * (d.n_experts - d.experts_alike)
    x_ND, expert_w_X = x.flatten(0, -2), _split_by_expert(w, widths)
    taken, inputs_ND = _taken(d, w, x_ND), x_ND[:, : d.neuron_width]
    h_NF = x.new_zeros(len(x_ND), sum(widths))
    for e, tokens, weight in tokens_by_expert(*taken, d.n_experts):
        if not len(tokens):  # autograd takes saved tensors without values for one another
            continue
        own = slice(e * d.d_ff, e * d.d_ff + widths[e])
        h_NF[tokens, own] = _expert_neurons(d, expert_w_X[e], inputs_ND[tokens], threshold) * weight
    return h_NF.view(*x.shape[:-1], -1)


def tokens_by_expert(taken_NK: Tensor, weight_NK: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert with (n,) the tokens that take it, in order, and (n, 1) how much its result weighs."""
    for e in range(experts):
        tokens, k = (taken_NK == e).nonzero(as_tuple=True)
        yield e, tokens, weight_NK[tokens, k, None]


def _split_by_expert(w: NamedTensors, widths: list[int]) -> list[NamedTensors]:
    """The weights of each expert's neurons."""
    names = [name for name in ("ffn/first", "ffn/first_bias", "ffn/up_bias", "ffn/rest") if name in w]
    chunks = (torch.split(w[name], widths) for name in names)
    return [dict(zip(names, expert_w, strict=True)) for expert_w in zip(*chunks, strict=True)]


def _expert_neurons(d: Decoder, w: NamedTensors, x: Tensor, threshold: float) -> Tensor:
    h = activate_(d, F.linear(x, w["ffn/first"], w.get("ffn/first_bias")), threshold)
    if d.ffn == "gated":
        up = F.linear(x, w["ffn/rest"][:, 0], w.get("ffn/up_bias"))
        if d.activation == "clamped_swiglu":
            up = up.clamp_(-CLAMP, CLAMP).add_(1)
        h *= up.relu_() if d.activation == "drelu" else up
    return F.rms_norm(h, h.shape[-1:], w["ffn/inner_norm"], d.norm_eps) if d.inner_norms else h


def routing(d: Decoder, w: NamedTensors, x: Tensor) -> Tensor:
    """(…, D) → (…, X) routing weights of the experts; see `routing` of the definition."""
    if d.n_experts == 1:
        return x.new_ones(*x.shape[:-1], 1)
    taken, weight = _taken(d, w, x)
    return weight.new_zeros(*x.shape[:-1], d.n_experts).scatter(-1, taken, weight)


def _taken(d: Decoder, w: NamedTensors, x: Tensor) -> tuple[Tensor, Tensor]:
    """(…, D) → (…, K) experts that a token takes, and (…, K) their weights; in a dense layer those of its FFN."""
    shared = d.experts_shared if "ffn/router" in w else d.dense_experts
    always = torch.arange(d.n_experts - shared, d.n_experts, device=x.device).expand(*x.shape[:-1], shared)
    if "ffn/router" not in w:
        return always, torch.ones_like(always, dtype=x.dtype)
    values = x[..., d.neuron_width :] if d.router_apart else _router_values(w, x)
    of_shared = torch.ones_like(always, dtype=values.dtype)
    if d.shared_gate:
        values, gate = torch.split(values, [d.experts_routed, 1], -1)
        of_shared = of_shared * gate.sigmoid()
    choices = _choices(d, values.sigmoid() + w["ffn/router_choice_bias"] if d.router_choice_bias else values)
    # A stable sort, unlike topk, takes the lower of two equal experts.
    best = choices.sort(dim=-1, descending=True, stable=True).indices[..., : d.experts_per_token - shared]
    if d.router_score == "sigmoid":
        shares = values.gather(-1, best).sigmoid().clamp_min(1e-30)
        weight = shares / shares.sum(-1, keepdim=True) if d.router_normalised else shares
    else:
        weight = values.gather(-1, best).softmax(-1) if d.router_normalised else values.softmax(-1).gather(-1, best)
    weight = weight * d.router_scale if d.router_scale != 1 else weight
    weight = weight * w["ffn/expert_scale"][best] if d.expert_scale else weight
    return torch.cat([best, always], -1), torch.cat([weight, of_shared], -1)


def _router_values(w: NamedTensors, x: Tensor) -> Tensor:
    return F.linear(x, w["ffn/router"], w.get("ffn/router_bias"))


def _choices(d: Decoder, choices: Tensor) -> Tensor:
    """What experts are chosen by, −∞ in groups from which none is taken; see `choices` of the definition."""
    if d.router_groups == d.router_groups_taken:
        return choices
    groups = choices.view(*choices.shape[:-1], d.router_groups, -1)
    order = groups.topk(d.router_group_top).values.sum(-1).sort(dim=-1, descending=True, stable=True).indices
    dropped = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order[..., d.router_groups_taken :], True)
    return groups.masked_fill(dropped[..., None], -torch.inf).flatten(-2)


def ffn_output(w: NamedTensors, h: Tensor) -> Tensor:
    """(…, X·F) neuron values → (…, D) outputs: Σ h_i rest_i + bias, or a matrix times that sum."""
    rest = w["ffn/rest"][:, -1]
    y = widened(w, _sum_experts(rest, h, len(w["ffn/router"])) if "ffn/router" in w else h @ rest)
    return y + w["ffn/down_bias"] if "ffn/down_bias" in w else y


def widened(w: NamedTensors, y: Tensor) -> Tensor:
    """What a sum of neurons adds to the FFN's output."""
    return F.linear(y, w["ffn/experts_out"]) if "ffn/experts_out" in w else y


def _sum_experts(rest: Tensor, h: Tensor, experts: int) -> Tensor:
    """h @ rest in about as many parts as there are experts; each for the tokens for which any of its neurons fires."""
    rows = len(rest) // experts
    y_ND = h.new_zeros(h.shape[:-1].numel(), rest.shape[1])
    for h_NF, part in zip(torch.split(h.flatten(0, -2), rows, -1), torch.split(rest, rows), strict=True):
        tokens = h_NF.any(-1).nonzero()[:, 0]
        y_ND.index_add_(0, tokens, h_NF[tokens] @ part)
    return y_ND.view(*h.shape[:-1], -1)


def logits(d: Decoder, global_w: NamedTensors, x_BTD: Tensor) -> Tensor:
    """(B, T, D …) last hidden states → (B, T, vocabulary) logits."""
    x_BTD = x_BTD[..., : d.d_model]
    if d.final_norm:
        x_BTD = norm(d, global_w, "final_norm", x_BTD)
    if d.d_embedding != d.d_model:
        x_BTD = F.linear(x_BTD, global_w["embedding_out"])
    z_BTV = F.linear(x_BTD, global_w["embedding" if d.tied_head else "head"], global_w.get("head_bias"))
    if d.logit_scale != 1:
        z_BTV = z_BTV * d.logit_scale
    return d.logit_softcap * torch.tanh(z_BTV / d.logit_softcap) if d.logit_softcap else z_BTV


def windows(tokens: np.ndarray[Any, np.dtype[Any]], length: int) -> Tensor:
    """A token stream → (N, length) consecutive windows, the rest dropped. Raises CorpusError if there is none."""
    n = len(tokens) // length
    if n == 0:
        raise CorpusError(f"the text has {len(tokens)} tokens", expected=f"at least one window of {length}")
    return torch.from_numpy(np.asarray(tokens[: n * length], np.int64).reshape(n, length))


def attention(
    d: Decoder, w: NamedTensors, x_BTD: Tensor, on_input: OnInput | None = None, keys: Keys | None = None
) -> Tensor:
    """Causal attention over (B, T, D) inputs, from position 0. `on_input` sees what its matrices multiply; `keys` has
    those and values of the last layers that had some."""
    qkv = F.linear(x_BTD, w["attention/qkv"], w.get("attention/qkv_bias"))
    if d.recurs:
        attended = _of_states(d, w, qkv, x_BTD)
    else:
        attended = _of_latents(d, w, qkv) if d.latent_rank else _of_heads(d, w, qkv, Keys() if keys is None else keys)
    if d.output_gate:
        attended = attended * torch.sigmoid(F.linear(x_BTD, w["attention/gate"]))
    if d.inner_norms:
        attended = F.rms_norm(attended, attended.shape[-1:], w["attention/inner_norm"], d.norm_eps)
    if on_input is not None:
        on_input("attention/qkv", x_BTD)
        if "attention/gate" in w:
            on_input("attention/gate", x_BTD)
        on_input("attention/out", attended)
    return F.linear(attended, w["attention/out"], w.get("attention/out_bias"))


def _of_heads(d: Decoder, w: NamedTensors, qkv: Tensor, keys: Keys) -> Tensor:
    """What each head takes of the values, from queries, keys and values."""
    batch, tokens, _ = qkv.shape
    qkv = torch.cat([qkv, qkv[..., -d.qkv_parts[1] :]], -1) if d.keys_as_values else qkv
    heads = qkv.view(batch, tokens, -1, d.head_dim).transpose(1, 2)
    q, k, v = torch.tensor_split(heads, [d.n_heads, d.n_heads + d.n_kv_heads], dim=1)
    cos, sin = _rotary(d, tokens, qkv.device)

    def turned(x: Tensor, name: str) -> Tensor:
        x = _norm_heads(d, w[f"attention/{name}_norm"], x) if d.qk_norm else x
        return rotate(x, cos, sin) if d.positions == "rope" else x

    if not d.shares_keys:
        v = F.rms_norm(v, (d.head_dim,), w["attention/v_norm"], d.norm_eps) if d.v_norm else v
        keys[d.window] = turned(k, "k"), v
    q, (k, v) = turned(q, "q"), keys[d.window]
    if d.query_growth or d.score_scale != 1:
        q = q * torch.from_numpy(query_factors(d, tokens)).to(q.device)[:, None]
    group = d.n_heads // d.n_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = _in_window(d, tokens, qkv.device) if d.window or d.attention_sinks else None
    if d.attention_sinks:  # a further position with this score, whose value is 0
        assert seen is not None
        seen = F.pad(
            torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -torch.inf).repeat(d.n_heads, 1, 1), (0, 1)
        )
        seen[..., -1] = w["attention/sinks"][:, None]
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    attended = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
    return attended.transpose(1, 2).reshape(batch, tokens, -1)


def _of_states(d: Decoder, w: NamedTensors, qkv: Tensor, x_BTD: Tensor) -> Tensor:
    """What the heads' states give, token by token, normed and gated; see `recurrence` of the definition."""
    z = F.linear(x_BTD, w["attention/gate"])
    if d.recurrence == "short_conv":
        b, z = z.chunk(2, -1)
        qkv = b * qkv
    padded = F.pad(qkv.mT, (d.state_columns - 1, 0))
    taps = w["attention/conv"].mT[:, None].contiguous()
    sums = F.conv1d(padded, taps, w.get("attention/conv_bias"), groups=d.qkv_width).mT
    if d.recurrence == "short_conv":
        return z * sums
    q, k, v = torch.split(F.silu(sums), [*d.qkv_parts], -1)
    q, v = (v, q) if d.recurrence == "mamba2" else (q, v)
    q, k = (part.reshape(*part.shape[:2], d.state_key_heads, -1) for part in (q, k))
    v, z = (part.reshape(*part.shape[:2], d.state_heads, -1) for part in (v, z))
    return _RECURRENCES[d.recurrence](d, w, q, k, v, z, F.linear(x_BTD, w["attention/gates"])).flatten(2)


def _shared(d: Decoder, x_BTGK: Tensor) -> Tensor:
    """Queries or keys as each head has them."""
    shared = d.state_heads // d.state_key_heads
    return x_BTGK.repeat(1, 1, shared, 1) if d.state_heads_tiled else x_BTGK.repeat_interleave(shared, 2)


def _gated_delta(
    d: Decoder, w: NamedTensors, q: Tensor, k: Tensor, v: Tensor, z: Tensor, gates: Tensor
) -> Tensor:  # fmt: skip
    q, k = (_shared(d, part * torch.rsqrt((part * part).sum(-1, keepdim=True) + LENGTH_EPS)) for part in (q, k))
    q = q / d.state_key_dim**0.5
    b, a = gates.chunk(2, -1)
    b, kept = b.sigmoid(), torch.exp(-w["attention/decay"] * F.softplus(a + w["attention/decay_bias"]))
    state, sums = v.new_zeros(len(v), d.state_heads, d.state_key_dim, d.state_value_dim), list[Tensor]()
    for t in range(v.shape[1]):
        state = state * kept[:, t, :, None, None]
        wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + k[:, t, :, :, None] * (b[:, t, :, None] * wrong)[:, :, None]
        sums.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    eps = d.state_norm_eps or d.norm_eps
    return F.rms_norm(torch.stack(sums, 1), (d.state_value_dim,), w["attention/state_norm"], eps) * F.silu(z)


def _mamba2(d: Decoder, w: NamedTensors, q: Tensor, k: Tensor, v: Tensor, z: Tensor, a: Tensor) -> Tensor:
    q, k = _shared(d, q), _shared(d, k)
    step = F.softplus(a + w["attention/decay_bias"]).clamp_min(d.state_least_step)
    kept, change = torch.exp(-w["attention/decay"] * step), step[..., None] * v
    state, sums = v.new_zeros(len(v), d.state_heads, d.state_key_dim, d.state_value_dim), list[Tensor]()
    for t in range(v.shape[1]):
        state = state * kept[:, t, :, None, None] + k[:, t, :, :, None] * change[:, t, :, None]
        sums.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    y = (torch.stack(sums, 1) + v * w["attention/skip"][:, None]) * F.silu(z)
    y = y.reshape(*y.shape[:2], d.state_key_heads, -1)
    return F.rms_norm(y, y.shape[-1:], eps=d.state_norm_eps or d.norm_eps).flatten(2) * w["attention/state_norm"]


_RECURRENCES = {"gated_delta": _gated_delta, "mamba2": _mamba2}


def _in_window(d: Decoder, tokens: int, device: Any) -> Tensor:
    """(T, T): whether a token sees a position."""
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return seen & ~seen.tril(-d.window) if d.window else seen


def _norm_heads(d: Decoder, weight: Tensor, x_BHTE: Tensor) -> Tensor:
    """The rms norm of each head, or of all heads of a token together."""
    if not d.joint_qk_norm:
        return F.rms_norm(x_BHTE, weight.shape, weight, d.norm_eps)
    x = F.rms_norm(x_BHTE.transpose(1, 2).flatten(2), weight.shape, weight, d.norm_eps)
    return x.view(*x.shape[:2], -1, d.head_dim).transpose(1, 2)


def _of_latents(d: Decoder, w: Mapping[str, Tensor], qkv: Tensor) -> Tensor:
    """The same from queries and latents, whose matrices are multiplied into queries and sums."""
    heads, half = d.n_heads, d.rotary_dim // 2
    q, c, k = torch.split(qkv, [d.qkv_width - d.cached_width, d.latent_rank, 2 * half], -1)
    if d.query_rank:
        q = F.linear(F.rms_norm(q, q.shape[-1:], w["attention/q_norm"], LATENT_EPS), w["attention/q_up"])
    parts = torch.split(q, [heads * (d.head_dim - 2 * half), heads * half, heads * half], -1)
    q, a, b = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in parts)
    cos, sin = _rotary(d, qkv.shape[1], qkv.device)
    c = F.rms_norm(c, c.shape[-1:], w["attention/k_norm"], LATENT_EPS)[:, None]
    k_up, v_up = (w[f"attention/{name}_up"] for name in "kv")
    q = q @ k_up.view(heads, -1, k_up.shape[1]).mT
    queries = torch.cat([q, rotate(torch.cat([a, b], -1), cos, sin)], -1)
    keys = torch.cat([c, rotate(k[:, None], cos, sin)], -1).expand(-1, heads, -1, -1)
    scale, values = d.score_scale / d.head_dim**0.5, c.expand(-1, heads, -1, -1)
    sums = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    return (sums @ v_up.view(heads, -1, d.latent_rank).mT).transpose(1, 2).flatten(2)


def _rotary(d: Decoder, tokens: int, device: Any) -> tuple[Tensor, Tensor]:
    frequencies = torch.tensor(d.rotary_frequencies, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32, device=device), frequencies)
    return angles.cos() * d.rotary_scale, angles.sin() * d.rotary_scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first columns of each head (…, T, E), as many as twice those of cosine and sine (T, J), turned."""
    half = cos.shape[-1]
    a, b, others = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, others], dim=-1)


Weights = dict[str, torch.Tensor]


class ResidentLayers:
    """Weights of one range of layers; asking for another frees them first.

    A worker goes through the layers in their order, so it reads each weight once.
    """

    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._layers, self._weights = range(0), list[Weights]()
        self._embedding: Weights = {}

    def weights(self, layers: range) -> list[Weights]:
        """The weights of each layer of a range."""
        if layers != self._layers:
            self._weights, self._embedding = [], {}
            self._weights = [layer_weights(self._checkpoint, n, self._device) for n in layers]
            self._layers = layers
        return self._weights

    def embed(self, ids_NT: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer; the embedding stays until other layers are asked for."""
        if not self._embedding:
            self._embedding = embedding_weights(self._checkpoint, self._device)
        return embed(self._checkpoint.decoder, self._embedding, ids_NT.to(self._device))


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Compute with a number of threads: the last bits of a sum depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
