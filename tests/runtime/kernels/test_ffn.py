"""The ladder of one FFN against NumPy: rungs, ranges of neurons, empty and full selections, one token and blocks.

Every call gets a poisoned workspace between guards, so a kernel that reads what it has not written, or writes where it
has no room, is found out.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.rounding import blocks_of
from support.stored import ROW_FORMATS, Layer, ffn_layer
from support.synthetic import small_decoder

from pi_runtime.artifact.decoder import ACTIVATIONS, GATED_ACTIVATIONS, SPARSE_ACTIVATIONS, Decoder
from pi_runtime.artifact.footprint import BLOCK_TOKENS, CHUNKS, FEW_TOKENS, GROUP
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.kernels import moe, reference
from pi_runtime.kernels.ffn import memory, network

FEW = settings(max_examples=40, deadline=None, derandomize=True)
RUNG = st.sampled_from(list(RUNGS))


@dataclass(frozen=True)
class Expected:
    """What the definition gives for neurons [low, high) of some tokens."""

    y_TD: np.ndarray
    read_TF: np.ndarray
    kept_TF: np.ndarray
    fires_TF: np.ndarray
    decided: bool
    """Whether no decision lies so near its border that a last bit may turn it."""


def expected(layer: Layer, x_TD: np.ndarray, rung: str, low: int, high: int) -> Expected:
    w, d = layer.values, layer.decoder
    inside = np.zeros((len(x_TD), d.d_ff), bool)
    inside[:, low:high] = True
    settings, z_TF = layer.settings(rung), w.product("ffn/first", x_TD) + (w["ffn/first_bias"] if d.ffn_bias else 0)
    chosen = reference.selected(w, settings, x_TD)
    read = inside if chosen is None else inside & chosen
    h_TF = reference.activate(d, z_TF, settings.threshold)
    kept = read if rung == "dense" else read & (h_TF != 0)
    y_TD = reference.ffn(d, w, x_TD, read, settings.threshold) - (w["ffn/down_bias"] if d.ffn_bias else 0)
    borders = np.abs(reference.scores(w, x_TD)), distance(d, z_TF, settings.threshold)
    decided = min(b.min() for b in borders) > 1e-5 and bytes_decided(layer, x_TD)
    fires = inside & (reference.activate(d, z_TF) * (up(layer, x_TD) if d.ffn == "gated" else 1) != 0)
    return Expected(y_TD, read, kept, fires, bool(decided))


def distance(d: Decoder, z_TF: np.ndarray, threshold: float) -> np.ndarray:
    """How far values are from where they begin to count; a gelu ends in zeros where its sums do."""
    limit = max(d.threshold, threshold)
    if limit or d.activation in ("gelu", "gelu_tanh"):
        return np.abs(np.abs(reference.activate(replace(d, threshold=0.0), z_TF)) - limit)
    return np.abs(z_TF)


def bytes_decided(layer: Layer, x_TD: np.ndarray) -> bool:
    """Whether r = down x, which the predictor rounds to bytes, is far enough from every half."""
    if not layer.values.matrices["predictor/up"].quantised:
        return True
    r_TR = layer.values.product("predictor/down", x_TD)
    quotient = blocks_of(r_TR) * 127 / np.maximum(np.abs(blocks_of(r_TR)).max(-1, keepdims=True), 1e-30)
    return bool(np.abs(np.abs(quotient - np.floor(quotient)) - 0.5).min() > 3e-4)


def up(layer: Layer, x_TD: np.ndarray) -> np.ndarray:
    w, d = layer.values, layer.decoder
    up_TF = w.product("ffn/rest", x_TD)[..., 0] + (w["ffn/up_bias"] if d.ffn_bias else 0)
    return np.maximum(up_TF, 0) if d.activation == "drelu" else up_TF


def decoders() -> st.SearchStrategy[Decoder]:
    return st.builds(
        lambda d_model, d_ff, kind, bias, threshold: small_decoder(
            d_model=d_model,
            d_ff=d_ff,
            activation=kind[0],
            ffn=kind[1],
            ffn_bias=bias,
            threshold=threshold if kind[0] in SPARSE_ACTIVATIONS else 0.0,
        ),
        st.integers(1, 70),
        st.integers(1, 6 * GROUP + 5),
        st.sampled_from(
            [(a, f) for a in ACTIVATIONS for f in ("gated", "plain") if a not in GATED_ACTIVATIONS or f == "gated"]
        ),
        st.booleans(),
        st.sampled_from([0.0, 0.0, 0.2]),
    )


def one_token(run: Any, layer: Layer, x_D: np.ndarray, rung: str, low: int, high: int) -> tuple[np.ndarray, int, int]:
    """(sum, rows of `first` read, neurons kept)."""
    layer.guarded.poison()
    y_1D, tally_13 = np.zeros((1, len(x_D)), np.float32), np.ones((1, 3), np.int64)
    run(layer.ffn, layer.batch(rung, low, high, 1), x_D[None], tally_13, y_1D)
    layer.guarded.assert_guards_whole()
    assert tally_13[0, memory.FIRES] == 0
    return y_1D[0], int(tally_13[0, memory.READ]), int(tally_13[0, memory.KEPT])


def block(layer: Layer, x_TD: np.ndarray, rung: str, low: int, high: int, *, select: bool = True) -> np.ndarray:
    """(T, D)."""
    y_TD, tally_T3 = np.zeros_like(x_TD), np.zeros((len(x_TD), 3), np.int64)
    layer.guarded.poison()
    batch = layer.batch(rung, low, high, len(x_TD), select=select)
    network.add_neurons(layer.ffn, batch, x_TD, tally_T3, y_TD)
    layer.guarded.assert_guards_whole()
    return y_TD


def inputs(layer: Layer, tokens: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, layer.decoder.d_model), np.float32)


def assert_close(found: np.ndarray, wanted: np.ndarray, fmt: str = "f32") -> None:
    """The factors of rows of block formats are rounded to 16 bits."""
    relative = 8e-5 if FORMATS[fmt].quantised else 2e-5
    error = relative * (1 + np.abs(wanted) + float(np.abs(wanted).max()))
    assert np.all(np.abs(found - wanted) <= error), np.abs(found - wanted).max()


@pytest.mark.parametrize("run", [network.add_neurons, network.serial_add_neurons], ids=["threaded", "serial"])
@FEW
@given(decoders(), st.sampled_from(ROW_FORMATS), RUNG, st.integers(1, 9), st.integers(0, 99))
@example(small_decoder(d_ff=2 * GROUP), "f32", "predicted", 4, 0)
@example(small_decoder(d_ff=GROUP + 1, d_model=1), "f16", "gate", 1, 0)
@example(small_decoder(d_ff=1, d_model=33), "bf16", "dense", 1, 0)
@example(small_decoder(d_ff=CHUNKS - 1), "f32", "dense", 3, 0)
@example(small_decoder(d_ff=5 * GROUP, d_model=133), "q8", "predicted", 40, 0)
@example(small_decoder(d_ff=40 * GROUP, d_model=65), "q8", "dense", 3, 0)
@example(small_decoder(d_ff=40 * GROUP, d_model=33), "q4", "dense", 3, 0)
@example(small_decoder(d_ff=5 * GROUP, d_model=300, activation="silu"), "q4", "gate", 3, 0)
@example(small_decoder(d_ff=5 * GROUP, d_model=512), "q8", "gate", 3, 0)
def test_one_token(run: Any, decoder: Decoder, fmt: str, rung: str, rank: int, seed: int) -> None:
    layer = ffn_layer(decoder, fmt, rank, seed)
    x_TD = inputs(layer, 1, seed)
    wanted = expected(layer, x_TD, rung, 0, decoder.d_ff)
    assume(wanted.decided)
    y_D, read, kept = one_token(run, layer, x_TD[0], rung, 0, decoder.d_ff)
    assert_close(y_D, wanted.y_TD[0], fmt)
    assert (read, kept) == (wanted.read_TF.sum(), wanted.kept_TF.sum())


@FEW
@given(decoders(), st.sampled_from(ROW_FORMATS), RUNG, st.integers(1, 7), st.integers(0, 99))
@example(small_decoder(d_ff=GROUP + 3, d_model=31), "f16", "predicted", BLOCK_TOKENS, 0)
@example(small_decoder(d_ff=GROUP + 3, d_model=131), "q8", "dense", BLOCK_TOKENS, 0)
@example(small_decoder(d_ff=GROUP + 3, d_model=301), "q4", "gate", BLOCK_TOKENS, 0)
@example(small_decoder(d_ff=9 * GROUP, d_model=600, activation="drelu"), "q8", "predicted", FEW_TOKENS + 1, 0)
def test_a_block_of_tokens(decoder: Decoder, fmt: str, rung: str, tokens: int, seed: int) -> None:
    layer = ffn_layer(decoder, fmt, 5, seed)
    x_TD = inputs(layer, tokens, seed)
    wanted = expected(layer, x_TD, rung, 0, decoder.d_ff)
    assume(wanted.decided)
    found_TD, tally_T3 = block(layer, x_TD, rung, 0, decoder.d_ff), np.zeros((tokens, 3), np.int64)
    assert_close(found_TD, wanted.y_TD, fmt)
    layer.guarded.poison()
    network.count_neurons(layer.ffn, layer.batch(rung, 0, decoder.d_ff, tokens), x_TD, tally_T3)
    layer.guarded.assert_guards_whole()
    exact = expected(layer, x_TD, "dense", 0, decoder.d_ff)
    fire_TF = exact.fires_TF
    tally = fire_TF.sum(1), wanted.read_TF.sum(1), (fire_TF & wanted.kept_TF).sum(1)
    np.testing.assert_array_equal(tally_T3.T, tally)
    assert_close(block(layer, x_TD, rung, 0, decoder.d_ff, select=False), exact.y_TD, fmt)
    for t in range(tokens):
        alone = one_token(network.add_neurons, layer, x_TD[t], rung, 0, decoder.d_ff)[0]
        np.testing.assert_array_equal(alone, found_TD[t])


@pytest.mark.parametrize("fmt", ["f16", "q8", "q4"])
def test_tokens_that_select_and_tokens_that_do_not_go_together(fmt: str) -> None:
    layer = ffn_layer(small_decoder(d_ff=700, d_model=300), fmt, 5, 0)
    x_TD, w_X = inputs(layer, 20), layer.experts_on("predicted")
    y_TD, tally_T3 = np.zeros_like(x_TD), np.zeros((20, 3), np.int64)
    select_T = (np.arange(20) % 3 == 0).astype(np.int64)
    moe.ffn_of_experts(layer.cfg, w_X, x_TD, select_T, layer.ws, tally_T3, y_TD)
    for select in (False, True):
        chosen = select_T == select
        alone = block(layer, x_TD[chosen], "predicted", 0, 700, select=select)
        np.testing.assert_array_equal(y_TD[chosen], alone)
    assert np.all(tally_T3[select_T == 0, memory.READ] == 700)
    assert np.all(tally_T3[select_T == 1, memory.READ] < 700)


def test_a_block_adds_to_what_is_there() -> None:
    layer = ffn_layer(small_decoder(), "f32", 3, 0)
    x_TD = inputs(layer, 4)
    y_TD = np.ones_like(x_TD)
    tally_T3 = np.zeros((4, 3), np.int64)
    network.add_neurons(layer.ffn, layer.batch("dense", 0, 40, 4, select=False), x_TD, tally_T3, y_TD)
    assert_close(y_TD, 1 + block(layer, x_TD, "dense", 0, 40))


@FEW
@given(decoders(), st.sampled_from(ROW_FORMATS), RUNG, st.data())
def test_ranges_of_neurons_add_up_to_the_whole(decoder: Decoder, fmt: str, rung: str, data: st.DataObject) -> None:
    layer = ffn_layer(decoder, fmt, 4, 0)
    cut = data.draw(st.integers(0, decoder.d_ff))
    x_TD = inputs(layer, 3)
    whole = expected(layer, x_TD, rung, 0, decoder.d_ff)
    assume(whole.decided)
    ranges = [(0, cut), (cut, decoder.d_ff)]
    for low, high in ranges:
        assert_close(block(layer, x_TD, rung, low, high), expected(layer, x_TD, rung, low, high).y_TD, fmt)
    assert_close(sum(block(layer, x_TD, rung, *part) for part in ranges), whole.y_TD, fmt)
    for run in (network.add_neurons, network.serial_add_neurons):
        parts = [one_token(run, layer, x_TD[0], rung, *part) for part in ranges]
        assert_close(parts[0][0] + parts[1][0], whole.y_TD[0], fmt)
        assert parts[0][1] + parts[1][1] == whole.read_TF[0].sum()
        assert parts[0][2] + parts[1][2] == whole.kept_TF[0].sum()


@pytest.mark.parametrize("run", [network.add_neurons, network.serial_add_neurons], ids=["threaded", "serial"])
@pytest.mark.parametrize("kind", ["gated", "plain"])
@pytest.mark.parametrize(("bias", "rows"), [(-1e9, 0), (1e9, 150)], ids=["nothing", "everything"])
@pytest.mark.parametrize("fmt", ["f16", "q8", "q4"])
def test_a_predictor_that_predicts(run: Any, kind: str, bias: float, rows: int, fmt: str) -> None:
    decoder = small_decoder(d_ff=150, ffn=kind)
    layer = ffn_layer(decoder, fmt, 4, 0, predictor__bias=np.full(150, bias, np.float32))
    x_TD = inputs(layer, 5)
    y_D, read, kept = one_token(run, layer, x_TD[0], "predicted", 0, 150)
    dense_TD = block(layer, x_TD, "dense", 0, 150)
    assert read == rows
    if rows:
        assert 0 < kept < rows
        assert_close(y_D, dense_TD[0], fmt)
        np.testing.assert_array_equal(block(layer, x_TD, "predicted", 0, 150), dense_TD)
    else:
        assert kept == 0
        assert not y_D.any()
        assert not block(layer, x_TD, "predicted", 0, 150).any()
    np.testing.assert_array_equal(block(layer, x_TD, "predicted", 0, 150, select=False), dense_TD)


@pytest.mark.parametrize("rung", ["gate", "predicted", "threshold"])
@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_drelu_reads_no_row_of_down_that_counts_for_nothing(rung: str, fmt: str) -> None:
    """Those rows are NaN here; 0 · NaN would show."""
    decoder = small_decoder(d_ff=400, activation="drelu")
    rest, x_TD = ffn_layer(decoder, fmt, 4, 0).values["ffn/rest"].copy(), inputs(ffn_layer(decoder, fmt, 4, 0), 1)
    rest[rest[:, 0] @ x_TD[0] <= 0, 1] = np.nan
    layer = ffn_layer(decoder, fmt, 4, 0, ffn__rest=rest)
    y_D, _, kept = one_token(network.add_neurons, layer, x_TD[0], rung, 0, 400)
    assert kept > 20
    assert np.isfinite(y_D).all()


@pytest.mark.parametrize("run", [network.add_neurons, network.serial_add_neurons], ids=["threaded", "serial"])
@pytest.mark.parametrize("rung", ["gate", "dense"])
@pytest.mark.parametrize("fmt", ROW_FORMATS)
def test_no_neuron_fires(run: Any, rung: str, fmt: str) -> None:
    first = -np.abs(np.random.default_rng(0).standard_normal((70, 32), np.float32))
    layer = ffn_layer(small_decoder(d_ff=70), fmt, 2, 0, ffn__first=first)
    x_TD = np.abs(inputs(layer, 3))
    y_D, read, kept = one_token(run, layer, x_TD[0], rung, 0, 70)
    assert (read, kept) == (70, 70 if rung == "dense" else 0)
    assert not y_D.any()
    assert not block(layer, x_TD, rung, 0, 70).any()


def test_the_smallest_activation_counts() -> None:
    """A neuron that fires by one denormal is not silent."""
    first = np.full((3, 1), -1, np.float32)
    first[1] = 2.0**-149
    layer = ffn_layer(small_decoder(d_ff=3, d_model=1, ffn="plain"), "f32", 1, 0, ffn__first=first)
    y_D, _, kept = one_token(network.add_neurons, layer, np.ones(1, np.float32), "gate", 0, 3)
    assert kept == 1
    assert abs(y_D[0] - layer.values["ffn/rest"][1, 0, 0] * 2.0**-149) <= 2.0**-149


@pytest.mark.parametrize(("activation", "large"), [("relu", 1e30), ("silu", 1e30), ("silu", 88.0), ("silu", 200.0)])
def test_large_activations(activation: str, large: float) -> None:
    """exp(−x) may overflow: silu(−large) is 0 and silu(large) is large."""
    first = np.array([[large], [-large]], np.float32)
    rest = np.ones((2, 1, 1), np.float32)
    decoder = small_decoder(d_ff=2, d_model=1, ffn="plain", activation=activation)
    layer = ffn_layer(decoder, "f32", 1, 0, ffn__first=first, ffn__rest=rest)
    x_D = np.ones(1, np.float32)
    assert_close(one_token(network.add_neurons, layer, x_D, "gate", 0, 2)[0], np.float32([large]))
    assert_close(block(layer, np.ones((2, 1), np.float32), "gate", 0, 2), np.full((2, 1), large, np.float32))
