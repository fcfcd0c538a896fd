"""The decoder over the tokens of a step: one compiled call for pieces of prompts and single tokens of any sequences.

Every weight that is needed is read once for all tokens, and no token changes another's bits. Shape letters: T tokens of
the step, R runs of consecutive tokens of one sequence, D model width, W embedding width, L layers, X experts, Q numbers
of a token's queries, keys and values, S positions, J rotary frequencies, N tokens whose logits are
wanted, V vocabulary, C·D the states of some layers side by side.
"""

from math import log1p
from typing import NamedTuple

import numpy as np

from pi_runtime.kernels import moe
from pi_runtime.kernels.codegen.indirect_calls import by_address
from pi_runtime.kernels.codegen.jit import device, public
from pi_runtime.kernels.codegen.threads import advanced
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.matrix_view import (
    F32,
    Floats,
    Ints,
    address_of,
    is_quantised,
    matrix,
    strided_rows,
    vector,
)
from pi_runtime.kernels.data.row_loading import load_row
from pi_runtime.kernels.data.weight_formats import GROUP_COLUMNS
from pi_runtime.kernels.data.weight_table import Ends, KernelConfig, LayerRecord, LayerRecords
from pi_runtime.kernels.data.workspace import Workspace
from pi_runtime.kernels.ops.activations import activate, times_sigmoid
from pi_runtime.kernels.ops.attention import LayerCache, attend, norm_heads, rotate, store_kv
from pi_runtime.kernels.ops.latent_attention import mix_latents
from pi_runtime.kernels.ops.linear import add_vector, finish_logits, linear, norm, prepare_inputs, product
from pi_runtime.kernels.ops.page_rows import unsteady
from pi_runtime.kernels.ops.recurrence import Made, States, mix_states

_load_row, _route = by_address(load_row), by_address(moe.route)
_ends_of_ffn = device(moe.ends_of_ffn)
_norm, _norm_heads, _mix_latents = by_address(norm), by_address(norm_heads), by_address(mix_latents)
_mix_states = by_address(mix_states)


class Positions(NamedTuple):
    """Where the tokens of a step stand."""

    position_T: Ints
    run_R4: Ints
    """Runs of consecutive tokens of a sequence: the first one's index, their number, the first one's position, and the
    address of the table of the cache's pages, a row for each place with a page of each class of layers."""
    keys: int
    """Code of the number format of keys."""
    values: int
    """Code of that of values."""


class Step(NamedTuple):
    """The tokens of one call."""

    tokens_T: Ints
    at: Positions
    select_T: Ints
    """1 to skip what the layer's rung skips, 0 to compute every neuron."""
    wanted_N: Ints
    """The tokens whose logits are wanted."""
    state_L: Ints
    """For each layer, and behind the last one, which of the states that are kept enters there; −1: none."""
    states_TC: Floats
    """The states that are kept."""


@public
def embed(
    cfg: KernelConfig, ends: Ends, eps: np.float32, tokens_T: Ints, position_T: Ints, ws: Workspace, x_TD: Floats
) -> None:
    """x ← the tokens' embeddings at the model's width, plus learned positions and normed where it has these."""
    tokens = tokens_T.shape[0]
    rows = matrix(cfg.embedding_format, ends.embedding, ends.embedding_scales, cfg.d_embedding)
    places = matrix(cfg.embedding_format, ends.positions, ends.positions_scales, cfg.d_model)
    if ends.embedding_in != 0:
        embedding_TW = ws.embedding_TW[:tokens]
        for t in range(tokens):
            _load_row(rows, tokens_T[t], 0, embedding_TW[t])
        widen = matrix(cfg.embedding_format, ends.embedding_in, ends.embedding_in_scales, cfg.d_embedding)
        linear(widen, cfg.d_model, 0, embedding_TW, address_of(ws.inputs), x_TD)
    else:
        for t in range(tokens):
            _load_row(rows, tokens_T[t], 0, x_TD[t])
    if cfg.embedding_scale != 1:
        scale = np.float32(cfg.embedding_scale)
        for t in range(tokens):
            for j in range(cfg.d_model):
                x_TD[t, j] *= scale
    if ends.positions != 0:
        position_D = ws.normed_TD[0]
        for t in range(tokens):
            _load_row(places, position_T[t] + cfg.position_offset, 0, position_D)
            _add(position_D, x_TD[t])
    if ends.embedding_norm != 0:
        _norm(cfg.centred, eps, ends.embedding_norm, ends.embedding_norm_bias, x_TD, x_TD)


@public
def attention(
    cfg: KernelConfig,
    w: LayerRecord,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    at: Positions,
    x_TD: Floats,
    ws: Workspace,
) -> None:
    """The block up to its FFN: adds attention to x, writes the FFN's input to `ws.normed_TD`, and chooses its experts,
    whose biases it adds.

    sequential   x ← x + attention(n₁(x)),  input n₂(x)
    parallel     input n₂(x) or n₁(x),  x ← x + attention(n₁(x))
    post-norm    x ← n₁(x + attention(x)),  input x
    reordered    input x + n₁(attention(x)),  x ← 0: the FFN's sum is normed alone, and `after_ffn` adds it to the input
    sandwich     x ← x + m₁(attention(n₁(x))),  input n₂(x),  `ws.residual_TD` ← x,  x ← 0
    """
    advanced()
    tokens = x_TD.shape[0]
    if cfg.router_early != 0:
        _route(cfg, w, x_TD, ws)
    normed_TD = ws.normed_TD[:tokens]
    if w.qkv == 0:
        ws.attended_TD[:tokens] = np.float32(0)
    elif cfg.block in (weight_table.POST_NORM, weight_table.REORDERED):
        _attend(cfg, w, eps, cos_SJ, sin_SJ, at, x_TD, ws)
    else:
        _norm(cfg.centred, eps, w.attention_norm, w.attention_norm_bias, x_TD, normed_TD)
        _attend(cfg, w, eps, cos_SJ, sin_SJ, at, normed_TD, ws)
    if cfg.block == weight_table.PARALLEL and w.ffn_norm != 0:
        _norm(cfg.centred, eps, w.ffn_norm, w.ffn_norm_bias, x_TD, normed_TD)
    _enter_ffn(cfg, w, eps, x_TD, ws)
    if w.router_norm != 0:
        _norm(0, eps, w.router_norm, 0, ws.residual_TD[:tokens], ws.attended_TD[:tokens])
        _route(cfg, w, ws.attended_TD[:tokens], ws)
    elif cfg.experts > 1 and cfg.router_early == 0 and w.d_ff != 0:
        _route(cfg, w, normed_TD, ws)
    if w.expert_bias != 0:
        moe.add_expert_biases(w, ws, x_TD)


@device
def _enter_ffn(cfg: KernelConfig, w: LayerRecord, eps: np.float32, x_TD: Floats, ws: Workspace) -> None:
    """Add attention to x, and write the FFN's input to `ws.normed_TD` but in a parallel block, which has it already."""
    tokens = x_TD.shape[0]
    normed_TD, attended_TD = ws.normed_TD[:tokens], ws.attended_TD[:tokens]
    attention_norm = w.attention_norm, w.attention_norm_bias
    if cfg.block == weight_table.REORDERED:
        _norm(cfg.centred, eps, *attention_norm, attended_TD, attended_TD)
    elif cfg.block == weight_table.SANDWICH:
        _norm(cfg.centred, eps, w.attention_out_norm, w.attention_out_norm_bias, attended_TD, attended_TD)
    for t in range(tokens):
        _add(attended_TD[t], x_TD[t])
    if cfg.block in (weight_table.SEQUENTIAL, weight_table.SANDWICH) and w.d_ff != 0:
        _norm(cfg.centred, eps, w.ffn_norm, w.ffn_norm_bias, x_TD, normed_TD)
    elif cfg.block == weight_table.POST_NORM:
        _norm(cfg.centred, eps, *attention_norm, x_TD, x_TD)
    if cfg.block in (weight_table.POST_NORM, weight_table.REORDERED):
        for t in range(tokens):
            _copy(x_TD[t], normed_TD[t])
    if cfg.block == weight_table.SANDWICH:
        for t in range(tokens):
            _copy(x_TD[t], ws.residual_TD[t])
    if cfg.block in (weight_table.REORDERED, weight_table.SANDWICH):
        x_TD[:] = np.float32(0)


@device
def _attend(
    cfg: KernelConfig,
    w: LayerRecord,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    at: Positions,
    x_TD: Floats,
    ws: Workspace,
) -> None:
    """ws.attended_TD ← attention(x)."""
    tokens = x_TD.shape[0]
    qkv_TQ, mixed_TQ = _of_width(ws.qkv_TQ, tokens, w.qkv_width), _of_width(ws.mixed_TQ, tokens, w.mixed_width)
    gate_TQ = _of_width(ws.gate_TQ, tokens if w.gate != 0 else 0, w.gate_width)
    out, gates_TG = matrix(w.out_format, w.out, w.out_scales, w.mixed_width), ws.gates_TG[:tokens]
    if w.gate != 0:
        gate = matrix(w.gate_format, w.gate, w.gate_scales, cfg.d_model)
        linear(gate, w.gate_width, 0, x_TD, address_of(ws.inputs), gate_TQ)
    if w.gates != 0:
        gates = matrix(F32, w.gates, 0, cfg.d_model)
        linear(gates, gates_TG.shape[1], 0, x_TD, address_of(ws.inputs), gates_TG)
    _project(cfg, w, x_TD, address_of(ws.inputs), qkv_TQ)
    pages = w.page_layer, w.kv_heads, w.cached_width, w.window, w.page_class, cfg.page_classes, w.sinks
    first = cos_SJ.shape[0] // 2 * w.second_angles
    cache = LayerCache(at.keys, at.values, *pages, w.angles, unsteady(cos_SJ[first:], sin_SJ[first:], w.angles))
    if w.recurrence != 0:
        heads = w.recurrence, cfg.state_heads, cfg.state_key_heads, cfg.state_heads_tiled
        sizes = cfg.state_key_dim, cfg.state_value_dim, cfg.state_columns, cfg.state_gates
        place = w.page_layer, w.page_class, cfg.page_classes
        weights = w.conv, w.conv_bias, w.decay, w.decay_bias, w.skip, w.state_norm
        eps, least = np.float32(cfg.state_norm_eps), np.float32(cfg.state_least_step)
        states = States(*heads, *sizes, *place, *weights, eps, least)
        _mix_states(states, Made(qkv_TQ, gates_TG, gate_TQ), at.run_R4, ws.attention_CX, mixed_TQ)
    elif cfg.latent_rank > 0:
        _mix_latents(cfg, w, cache, cos_SJ, sin_SJ, at.position_T, at.run_R4, ws)
    else:
        _mix(cfg, w, eps, cache, cos_SJ, sin_SJ, at, ws, qkv_TQ, mixed_TQ)
    if w.recurrence == 0 and w.gate != 0:
        for t in range(tokens):
            times_sigmoid(gate_TQ[t], mixed_TQ[t])
    if w.attention_inner_norm != 0:
        _norm(0, eps, w.attention_inner_norm, 0, mixed_TQ, mixed_TQ)
    linear(out, cfg.d_model, w.out_bias, mixed_TQ, address_of(ws.inputs), ws.attended_TD[:tokens])


@device
def _of_width(memory_TQ: Floats, tokens: int, width: int) -> Floats:
    """The beginning of a buffer as a matrix of this width."""
    return memory_TQ.reshape(-1)[: tokens * width].reshape(tokens, width)


@device
def _project(cfg: KernelConfig, w: LayerRecord, x_TD: Floats, inputs: int, qkv_TQ: Floats) -> None:
    """qkv ← queries, keys and values, by one matrix or by those of keys and values too."""
    rows, width = w.kv_heads * w.head_dim, qkv_TQ.shape[1]
    fmt = w.qkv_format if is_quantised(w.qkv_format) or w.v == 0 else w.v_format
    prepare_inputs(fmt if is_quantised(fmt) or w.k == 0 else w.k_format, x_TD, inputs)
    end = width - rows * ((w.k != 0) + (w.v != 0) + w.keys_as_values)
    product(matrix(w.qkv_format, w.qkv, w.qkv_scales, cfg.d_model), 0, end, w.qkv_bias, inputs, qkv_TQ)
    if w.k != 0:
        k = matrix(w.k_format, w.k, w.k_scales, cfg.d_model)
        product(k, width - 2 * rows, width - rows, w.qkv_bias, inputs, qkv_TQ)
    if w.v != 0:
        product(matrix(w.v_format, w.v, w.v_scales, cfg.d_model), width - rows, width, w.qkv_bias, inputs, qkv_TQ)
    if w.keys_as_values != 0:
        for t in range(qkv_TQ.shape[0]):
            _copy(qkv_TQ[t, width - 2 * rows : width - rows], qkv_TQ[t, width - rows :])


@device
def _mix(
    cfg: KernelConfig, w: LayerRecord, eps: np.float32, cache: LayerCache, cos_SJ: Floats, sin_SJ: Floats,
    at: Positions, ws: Workspace, qkv_TQ: Floats, mixed_TQ: Floats,
) -> None:  # fmt: skip
    """mixed ← what each head takes of the values, from queries, keys and values."""
    if w.q_norm != 0:
        # A joint norm is that of a single head, as wide as all of them.
        heads, kv_heads = (1, 1) if cfg.joint_qk_norm else (cfg.heads, w.kv_heads)
        width, kv_width = cfg.heads * w.head_dim // heads, w.kv_heads * w.head_dim // kv_heads
        _norm_heads(eps, w.q_norm, 0, heads, width, qkv_TQ)
        if w.made_heads != 0:
            _norm_heads(eps, w.k_norm, heads * width // kv_width, kv_heads, kv_width, qkv_TQ)
    if w.v_norm != 0:
        _norm_heads(eps, w.v_norm, cfg.heads + w.kv_heads, w.kv_heads, w.head_dim, qkv_TQ)
    if w.angles > 0:
        first, heads = cos_SJ.shape[0] // 2 * w.second_angles, cfg.heads + w.made_heads
        rotate(cos_SJ[first:], sin_SJ[first:], w.angles, at.position_T, heads, w.head_dim, qkv_TQ)
    if cfg.query_growth != 0 or cfg.score_scale != 1:
        for t in range(qkv_TQ.shape[0]):
            turns = at.position_T[t] // max(1, cfg.query_period)
            factor = np.float32(cfg.score_scale * (1 + cfg.query_growth * log1p(turns)))
            for i in range(cfg.heads * w.head_dim):
                qkv_TQ[t, i] *= factor
    if w.made_heads != 0:
        store_kv(cache, qkv_TQ, at.run_R4)
    attend(cache, qkv_TQ, at.run_R4, ws.unpacked_CBE, ws.attention_CX, mixed_TQ)


@public
def after_ffn(
    cfg: KernelConfig, ends: Ends, w: LayerRecord, eps: np.float32, tokens_T: Ints, residual_TD: Floats, ws: Workspace,
    x_TD: Floats,
) -> None:  # fmt: skip
    """x ← x + the FFN's bias, the sum of narrower experts, and the FFN beside them, normed where the block ends with a
    norm, and what is made of the layers' embedding; see `residual_of` for the residual. `ws` has room for as many
    tokens where any of these is there."""
    for t in range(x_TD.shape[0]):
        add_vector(w.down_bias, x_TD[t])
    if w.experts_out != 0:
        _add_narrow(cfg, w, ws, x_TD)
    if w.beside_first != 0:
        _add_beside(cfg, w, eps, residual_TD, ws, x_TD)
    if cfg.block in (weight_table.POST_NORM, weight_table.REORDERED):
        _norm(cfg.centred, eps, w.ffn_norm, w.ffn_norm_bias, x_TD, x_TD)
    elif cfg.block == weight_table.SANDWICH:
        _norm(cfg.centred, eps, w.ffn_out_norm, w.ffn_out_norm_bias, x_TD, x_TD)
    if cfg.block in (weight_table.REORDERED, weight_table.SANDWICH):
        for t in range(x_TD.shape[0]):
            _add(residual_TD[t], x_TD[t])
    if ends.layer_embedding != 0:
        _add_embedding(cfg, ends, w, eps, tokens_T, ws, x_TD)
    if w.block_scale != 0:
        scale = vector(w.block_scale, 1)[0]
        for t in range(x_TD.shape[0]):
            for j in range(cfg.d_model):
                x_TD[t, j] *= scale


@device
def _add_narrow(cfg: KernelConfig, w: LayerRecord, ws: Workspace, x_TD: Floats) -> None:
    """x ← x + the sum of narrower experts."""
    wide, y_TD = matrix(w.experts_out_format, w.experts_out, w.experts_out_scales, cfg.neuron_width), ws.attended_TD
    linear(wide, cfg.d_model, 0, ws.narrow_sum_TL[: x_TD.shape[0]], address_of(ws.inputs), y_TD[: x_TD.shape[0]])
    for t in range(x_TD.shape[0]):
        _add(y_TD[t], x_TD[t])


@device
def _add_beside(
    cfg: KernelConfig, w: LayerRecord, eps: np.float32, residual_TD: Floats, ws: Workspace, x_TD: Floats
) -> None:
    """x ← x + the FFN beside the experts; or the norm of x, their sum, + the norm of what is beside them."""
    tokens, inputs, width = x_TD.shape[0], address_of(ws.inputs), ws.beside_TF.shape[1]
    h_TF, up_TF, y_TD = ws.beside_TF[:tokens], ws.beside_TF[tokens : 2 * tokens], ws.attended_TD[:tokens]
    if w.beside_norm != 0:
        _norm(0, eps, w.beside_norm, 0, residual_TD, y_TD)
    else:
        y_TD[:] = residual_TD
    linear(
        matrix(w.beside_first_format, w.beside_first, w.beside_first_scales, cfg.d_model), width, 0, y_TD, inputs, h_TF
    )
    if w.beside_up != 0:
        linear(matrix(w.beside_up_format, w.beside_up, w.beside_up_scales, cfg.d_model), width, 0, y_TD, inputs, up_TF)
    else:
        up_TF[:] = np.float32(1)
    for t in range(tokens):
        activate(cfg.activation, np.float32(cfg.threshold), h_TF[t])
        for i in range(width):
            h_TF[t, i] *= up_TF[t, i]
    linear(matrix(w.beside_down_format, w.beside_down, w.beside_down_scales, width), cfg.d_model, 0, h_TF, inputs, y_TD)
    if w.beside_norm != 0:
        _norm(0, eps, w.beside_out_norm, 0, y_TD, y_TD)
        _norm(0, eps, w.experts_out_norm, 0, x_TD, x_TD)
    for t in range(tokens):
        _add(y_TD[t], x_TD[t])


@device
def _add_embedding(
    cfg: KernelConfig, ends: Ends, w: LayerRecord, eps: np.float32, tokens_T: Ints, ws: Workspace, x_TD: Floats
) -> None:
    """x ← x + what is made of the tokens' rows of the layers' embedding (see `artifact.decoder`)."""
    tokens, inputs, width, fmt = x_TD.shape[0], address_of(ws.inputs), cfg.layer_embedding, cfg.embedding_format
    e_TP, h_TP = ws.layer_embedding_TP[:tokens], ws.layer_embedding_TP[tokens : 2 * tokens]
    # The embedding is read again: to keep it would take as much memory for each token of a long piece.
    y_TD, first = ws.attended_TD[:tokens], w.layer * width
    embed(cfg, ends, eps, tokens_T, tokens_T, ws, y_TD)
    whole = matrix(fmt, ends.layer_embedding_in, ends.layer_embedding_in_scales, cfg.d_model)
    linear(strided_rows(whole, 1, first), width, 0, y_TD, inputs, e_TP)
    for t in range(tokens):
        for j in range(width):
            e_TP[t, j] /= np.sqrt(np.float32(cfg.d_model))
    _norm(0, eps, ends.layer_embedding_norm, 0, e_TP, e_TP)
    rows = matrix(fmt, ends.layer_embedding, ends.layer_embedding_scales, cfg.n_layers * width)
    group = first // GROUP_COLUMNS * GROUP_COLUMNS
    row = ws.token_row[: first - group + width]
    for t in range(tokens):
        _load_row(rows, tokens_T[t], group, row)
        for j in range(width):
            e_TP[t, j] = (e_TP[t, j] + row[first - group + j] * np.sqrt(np.float32(width))) * np.float32(0.5**0.5)
    gate = matrix(w.embedding_gate_format, w.embedding_gate, w.embedding_gate_scales, cfg.d_model)
    linear(gate, width, 0, x_TD, inputs, h_TP)
    for t in range(tokens):
        activate(cfg.activation, np.float32(cfg.threshold), h_TP[t])
        for j in range(width):
            h_TP[t, j] *= e_TP[t, j]
    out = matrix(w.embedding_out_format, w.embedding_out, w.embedding_out_scales, width)
    linear(out, cfg.d_model, 0, h_TP, inputs, y_TD)
    _norm(0, eps, w.embedding_norm, 0, y_TD, y_TD)
    for t in range(tokens):
        _add(y_TD[t], x_TD[t])


@device
def residual_of(cfg: KernelConfig, ws: Workspace) -> Floats:
    """What `after_ffn` adds where the FFN's sum is normed alone: the FFN's input, or what is kept for it."""
    return ws.residual_TD if cfg.block == weight_table.SANDWICH else ws.normed_TD


@public
def head(cfg: KernelConfig, ends: Ends, eps: np.float32, x_TD: Floats, ws: Workspace, logits_TV: Floats) -> None:
    """logits ← norm(x) Wᵀ + bias, with norm(x) brought to the embedding's width; x is overwritten."""
    tokens, inputs = x_TD.shape[0], address_of(ws.inputs)
    if ends.norm != 0:
        _norm(cfg.centred, eps, ends.norm, ends.norm_bias, x_TD, x_TD)
    rows = matrix(cfg.head_format, ends.head, ends.head_scales, cfg.d_embedding)
    if ends.embedding_out != 0:
        narrow = matrix(cfg.embedding_format, ends.embedding_out, ends.embedding_out_scales, cfg.d_model)
        linear(narrow, cfg.d_embedding, 0, x_TD, inputs, ws.embedding_TW[:tokens])
        linear(rows, cfg.vocabulary, ends.head_bias, ws.embedding_TW[:tokens], inputs, logits_TV)
    else:
        linear(rows, cfg.vocabulary, ends.head_bias, x_TD, inputs, logits_TV)
    if cfg.logit_scale != 1 or cfg.logit_softcap > 0:
        finish_logits(np.float32(cfg.logit_scale), np.float32(cfg.logit_softcap), logits_TV)


_embed, _attention, _head = by_address(embed), by_address(attention), by_address(head)
_ffn = by_address(moe.ffn_of_experts)


@public
def forward(
    cfg: KernelConfig,
    ends: Ends,
    table_LX: LayerRecords,
    eps: np.float32,
    cos_SJ: Floats,
    sin_SJ: Floats,
    step: Step,
    ws: Workspace,
) -> None:
    """Run the tokens of a step: the logits that are wanted go to `ws.logits_TV`, keys and values to the caches.

    `ws.counts_LT3` ← what `network.add_neurons` counts. All numbers are float32 but those of the cache (see
    `attention`).
    """
    at, select_T, wanted_N, tokens = step.at, step.select_T, step.wanted_N, step.tokens_T.shape[0]
    x_TD, wanted, layers, tokens_T = ws.x_TD[:tokens], wanted_N.shape[0], table_LX.shape[0], step.tokens_T
    # Of the last layer nobody reads more than the wanted tokens: the others end with their keys and values.
    wanted_alone = wanted < tokens and cfg.experts == 1 and step.state_L[layers] < 0
    _embed(cfg, ends, eps, tokens_T, at.position_T, ws, x_TD)
    for layer in range(layers):
        keep_state(step.state_L, step.states_TC, layer, x_TD)
        w_X = table_LX[layer]
        _attention(cfg, w_X[0], eps, cos_SJ, sin_SJ, at, x_TD, ws)
        if wanted_alone and layer == layers - 1:
            select_T = _bring_forward(wanted_N, select_T, residual_of(cfg, ws), ws)
            tokens, tokens_T, x_TD = wanted, step.tokens_T[wanted_N], ws.x_TD[:wanted]
        tally_T3 = ws.counts_LT3[layer, :tokens]
        input_TD, sum_TD = _ends_of_ffn(ws)
        _ffn(cfg, w_X, input_TD[:tokens], select_T, ws, tally_T3, sum_TD[:tokens])
        after_ffn(cfg, ends, w_X[0], eps, tokens_T, residual_of(cfg, ws)[:tokens], ws, x_TD)
    if wanted_alone:
        for n in range(wanted - 1, -1, -1):
            ws.counts_LT3[layers - 1, wanted_N[n]] = ws.counts_LT3[layers - 1, n]
    keep_state(step.state_L, step.states_TC, layers, x_TD)
    wanted_ND = ws.attended_TD[:wanted]
    for n in range(wanted):
        _copy(x_TD[n if wanted_alone else wanted_N[n]], wanted_ND[n])
    _head(cfg, ends, eps, wanted_ND, ws, ws.logits_TV[:wanted])


@device
def _bring_forward(wanted_N: Ints, select_T: Ints, residual_TD: Floats, ws: Workspace) -> Ints:
    """Move what an FFN takes of some tokens, in ascending order, to the front; returns whether they select."""
    select_N = ws.taken_select_T[: wanted_N.shape[0]]
    for n in range(wanted_N.shape[0]):
        select_N[n] = select_T[wanted_N[n]]
        _copy(ws.x_TD[wanted_N[n]], ws.x_TD[n])
        _copy(residual_TD[wanted_N[n]], residual_TD[n])
        _copy(ws.normed_TD[wanted_N[n]], ws.normed_TD[n])
    return select_N


@public
def keep_state(state_L: Ints, states_TC: Floats, layer: int, x_TD: Floats) -> None:
    """Keep x as it enters a layer, or leaves the last one, where that is asked for."""
    at = state_L[layer] * x_TD.shape[1]
    if at >= 0:
        for t in range(x_TD.shape[0]):
            _copy(x_TD[t], states_TC[t, at : at + x_TD.shape[1]])


@device
def _add(y_D: Floats, x_D: Floats) -> None:
    """x ← x + y."""
    for j in range(x_D.shape[0]):
        x_D[j] += y_D[j]


@device
def _copy(y_D: Floats, x_D: Floats) -> None:
    """x ← y."""
    for j in range(x_D.shape[0]):
        x_D[j] = y_D[j]
