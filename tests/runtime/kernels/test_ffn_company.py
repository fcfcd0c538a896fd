"""A token gets the same bits alone and in any company, and no neuron is left out or taken twice."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.stored import ROW_FORMATS, Layer, ffn_layer
from support.synthetic import small_decoder

from pi_runtime.artifact.decoder import ACTIVATIONS, GATED_ACTIVATIONS, Decoder
from pi_runtime.artifact.footprint import CHUNKS, FEW_TOKENS, GROUP, SUM_NEURONS
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.kernels import moe
from pi_runtime.kernels.ffn import memory, network
from pi_runtime.kernels.split_ffn import NeuronLists, cold_sum, predict

FEW = settings(max_examples=40, deadline=None, derandomize=True)
MOST_TOKENS = FEW_TOKENS + 4
KINDS = [(a, f) for a in ACTIVATIONS for f in ("gated", "plain") if a not in GATED_ACTIVATIONS or f == "gated"]
PLAIN = small_decoder(d_ff=700, d_model=300)


@dataclass(frozen=True)
class Tokens:
    """Inputs of an FFN, and what the model says of each: its experts, their weights, and whether it selects."""

    x_TD: np.ndarray
    expert_TK: np.ndarray
    route_weight_TK: np.ndarray
    select_T: np.ndarray

    def some(self, which: np.ndarray) -> "Tokens":
        return Tokens(self.x_TD[which], self.expert_TK[which], self.route_weight_TK[which], self.select_T[which])


def random_tokens(decoder: Decoder, count: int, seed: int) -> Tokens:
    rng, taken = np.random.default_rng(seed), decoder.experts_per_token
    experts = [rng.permutation(decoder.n_experts)[:taken] for _ in range(count)]
    weights = rng.random((count, taken), np.float32) if decoder.n_experts > 1 else np.ones((count, 1), np.float32)
    x_TD = rng.standard_normal((count, decoder.d_model), np.float32)
    return Tokens(x_TD, np.array(experts, np.int64), weights, rng.integers(0, 2, count))


def run(layer: Layer, rung: str, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """The FFN with its experts: (sums, counts)."""
    count, ws = len(tokens.x_TD), layer.ws
    layer.guarded.poison()
    ws.expert_TK[:count], ws.route_weight_TK[:count] = tokens.expert_TK, tokens.route_weight_TK
    y_TD, tally_T3 = np.zeros_like(tokens.x_TD), np.ones((count, 3), np.int64)
    w_X = layer.experts_on(rung)
    moe.ffn_of_experts(layer.cfg, w_X, tokens.x_TD, tokens.select_T, ws, tally_T3, y_TD)
    layer.guarded.assert_guards_whole()
    return y_TD, tally_T3


def decoders() -> st.SearchStrategy[Decoder]:
    return st.builds(
        lambda d_model, d_ff, kind, experts, bias: small_decoder(
            d_model=d_model,
            d_ff=d_ff,
            activation=kind[0],
            ffn=kind[1],
            ffn_bias=bias and experts == 1,
            n_experts=experts,
            experts_per_token=(experts + 1) // 2,
        ),
        st.integers(1, 600),
        st.integers(1, 40 * GROUP),
        st.sampled_from(KINDS),
        st.sampled_from([1, 1, 3]),
        st.booleans(),
    )


@FEW
@given(
    decoders(), st.sampled_from(ROW_FORMATS), st.sampled_from(list(RUNGS)), st.integers(1, MOST_TOKENS),
    st.integers(0, 99),
)  # fmt: skip
@example(PLAIN, "q8", "predicted", MOST_TOKENS, 0)
@example(PLAIN, "f16", "predicted", MOST_TOKENS, 1)
@example(PLAIN, "q4", "gate", MOST_TOKENS, 0)
@example(PLAIN, "f32", "gate", FEW_TOKENS, 0)
@example(small_decoder(d_ff=300, activation="drelu"), "f32", "predicted", MOST_TOKENS, 0)
@example(small_decoder(d_ff=300, activation="drelu"), "q8", "dense", FEW_TOKENS, 0)
@example(small_decoder(d_ff=90, n_experts=5, experts_per_token=3), "f16", "predicted", MOST_TOKENS, 0)
@example(small_decoder(d_ff=90, n_experts=5, experts_per_token=3), "q4", "threshold", MOST_TOKENS, 0)
@example(small_decoder(d_ff=CHUNKS * SUM_NEURONS + 700, d_model=40), "q8", "gate", 3, 0)
@example(small_decoder(d_ff=CHUNKS * SUM_NEURONS + 700, d_model=40), "q4", "predicted", MOST_TOKENS, 0)
@example(small_decoder(d_ff=CHUNKS * SUM_NEURONS + 700, d_model=40), "f16", "threshold", MOST_TOKENS, 0)
@example(small_decoder(d_ff=CHUNKS * SUM_NEURONS + 700, d_model=40), "f32", "predicted", 5, 0)
@example(small_decoder(d_ff=2300, d_model=2048), "f32", "predicted", 5, 0)
def test_company_changes_no_bit(decoder: Decoder, fmt: str, rung: str, tokens: int, seed: int) -> None:
    layer, given_T = ffn_layer(decoder, fmt, 5, seed), random_tokens(decoder, tokens, seed)
    alone = [run(layer, rung, given_T.some(np.array([t]))) for t in range(tokens)]
    rng = np.random.default_rng(seed)
    for size in {tokens, int(rng.integers(1, tokens + 1))}:
        which = rng.permutation(tokens)[:size]
        y_TD, tally_T3 = run(layer, rung, given_T.some(which))
        for y_D, tally_3, t in zip(y_TD, tally_T3, which, strict=True):
            np.testing.assert_array_equal(y_D, alone[t][0][0])
            assert tally_3[memory.READ] == alone[t][1][0, memory.READ]
            assert tally_3[memory.KEPT] == alone[t][1][0, memory.KEPT]


@FEW
@given(decoders(), st.sampled_from(ROW_FORMATS), st.sampled_from(list(RUNGS)), st.integers(1, MOST_TOKENS), st.data())
def test_a_range_of_neurons_has_one_sum(
    decoder: Decoder, fmt: str, rung: str, tokens: int, data: st.DataObject
) -> None:
    """Alone on the threads, alone on one thread, and in company."""
    low = data.draw(st.integers(0, decoder.d_ff))
    high = data.draw(st.integers(low, decoder.d_ff))
    layer, x_TD = ffn_layer(decoder, fmt, 4, 0), random_tokens(decoder, tokens, 0).x_TD

    def add(function: Any, x_TD: np.ndarray) -> np.ndarray:
        layer.guarded.poison()
        y_TD, tally_T3 = np.zeros_like(x_TD), np.ones((len(x_TD), 3), np.int64)
        batch = layer.batch(rung, low, high, len(x_TD), route_weight=0.7)
        function(layer.ffn, batch, x_TD, tally_T3, y_TD)
        layer.guarded.assert_guards_whole()
        return y_TD

    whole_TD = add(network.add_neurons, x_TD)
    for t in range(tokens):
        for function in (network.add_neurons, network.serial_add_neurons):
            np.testing.assert_array_equal(add(function, x_TD[t : t + 1])[0], whole_TD[t])


@FEW
@given(decoders(), st.sampled_from(ROW_FORMATS), st.integers(1, 4), st.integers(0, 99))
def test_a_list_of_neurons_gives_what_their_predictor_gives(decoder: Decoder, fmt: str, tokens: int, seed: int) -> None:
    rung = "predicted"
    layer, some = ffn_layer(decoder, fmt, 5, seed), random_tokens(decoder, tokens, seed)
    some.select_T[:] = 1
    wanted_MD, tally_M3 = run(layer, rung, some)
    f, w_X, x_MD, expert_MK = layer.ffn, layer.experts_on(rung), some.x_TD, some.expert_TK
    cut_X = base_X = np.zeros(decoder.n_experts, np.int64)
    hot_MF, cold_MF = (np.empty((tokens, expert_MK.shape[1] * decoder.d_ff), np.int32) for _ in range(2))
    hot_M, cold_M = (np.empty(tokens, np.int32) for _ in range(2))
    cold = NeuronLists(cold_M, cold_MF)
    layer.guarded.poison()
    predict(f, w_X, x_MD, expert_MK, cut_X, base_X, NeuronLists(hot_M, hot_MF), cold)
    np.testing.assert_array_equal(hot_M, 0)
    np.testing.assert_array_equal(cold_M, tally_M3[:, memory.READ])
    layer.guarded.poison()
    routed, found_M3 = (expert_MK.astype(np.int32), some.route_weight_TK), np.ones_like(tally_M3)
    y_MD = np.full_like(x_MD, np.nan)
    cold_sum(f, w_X, x_MD, *routed, cut_X, True, cold, found_M3, y_MD)
    layer.guarded.assert_guards_whole()
    np.testing.assert_array_equal(y_MD, wanted_MD)
    kept = [memory.READ, memory.KEPT]
    np.testing.assert_array_equal(found_M3[:, kept], tally_M3[:, kept])


@pytest.mark.parametrize("d_ff", [1, 31, 33, 700, CHUNKS * GROUP, CHUNKS * SUM_NEURONS + 700])
def test_chunks_take_every_neuron_once(d_ff: int) -> None:
    layer = ffn_layer(small_decoder(d_ff=d_ff, d_model=8), "f16", 1, 0)
    x_1D, rng = np.ones((1, 8), np.float32), np.random.default_rng(d_ff)
    for low, high in ((0, d_ff), *np.sort(rng.integers(0, d_ff + 1, (5, 2))).tolist()):
        result = np.zeros((1, 3), np.int64), np.zeros((1, 8), np.float32)
        layer.guarded.poison()
        network.add_neurons(layer.ffn, layer.batch("gate", low, high, 1), x_1D, *result)
        lists = [list_K[:count] for list_K, count in zip(layer.ws.list_CK, layer.ws.count_C, strict=True)]
        np.testing.assert_array_equal(np.sort(np.concatenate(lists)), np.arange(low, high))
        for chunk, list_K in enumerate(lists):
            assert np.all(np.diff(list_K) > 0)
            assert np.all(list_K // GROUP % CHUNKS == int(f"{chunk:05b}"[::-1], 2))
