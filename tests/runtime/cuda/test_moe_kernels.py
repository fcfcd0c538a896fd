"""Kernels of mixtures of experts against the NumPy definition: odd shapes, equal values, experts with no neurons."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.gpu_kernels import COLUMNS, FEW, FORMAT, TILING, Stored, assert_close, integers, normal
from support.synthetic import small_decoder

from pi_runtime.cuda.kernels import moe
from pi_runtime.cuda.kernels.compaction import NeuronList
from pi_runtime.cuda.kernels.ffn_neurons import predict
from pi_runtime.cuda.kernels.moe import DeviceCuts, Routing
from pi_runtime.cuda.kernels.row_dot import linear
from pi_runtime.cuda.kernels.tiling import Tiling
from pi_runtime.execution.plan_layout import Cuts
from pi_runtime.kernels import reference

EXPERTS = st.integers(2, 9)
WIDTHS = st.sampled_from([1, 5, 64, 300])


def routing_of(device: torch.device, expert_K: np.ndarray, rng: np.random.Generator) -> tuple[Routing, np.ndarray]:
    """One token's routing, on the device and the weights here."""
    route_weight_K = rng.random(len(expert_K), np.float32)
    weights = torch.from_numpy(route_weight_K.copy()).to(device)
    return Routing(integers(device, expert_K)[None], weights[None]), route_weight_K


def drawn(experts_: int, width: int, data: st.DataObject) -> tuple[Cuts, np.ndarray, np.random.Generator]:
    """Cuts, often none or all of an expert, and experts taken in any order."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    taken = data.draw(st.integers(1, experts_))
    cut_X = [data.draw(st.sampled_from([0, width, width // 2, 1])) for _ in range(experts_)]
    return Cuts.of(cut_X, width, taken), rng.permutation(experts_)[:taken].astype(np.int32), rng


def list_of(device: torch.device, room: int) -> NeuronList:
    return NeuronList.of(integers(device, np.full((1, room), -1)), integers(device, [-1]))


@FEW
@given(EXPERTS, st.data())
def test_route(device: torch.device, n_experts: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, n_experts))
    values = np.random.default_rng(n_experts).integers(-2, 3, n_experts).astype(np.float32)  # many are equal
    normalised = data.draw(st.booleans())
    decoder = small_decoder(n_experts=n_experts, experts_per_token=count, router_normalised=normalised)
    wanted = reference.routing(decoder, {"ffn/router": values[:, None]}, np.ones((1, 1), np.float32))[0]
    found = Routing(integers(device, np.full((2, count), -1)), torch.zeros(2, count, device=device))
    moe.route(torch.from_numpy(np.stack([values, values[::-1]])).to(device), found, normalised=normalised)
    order = np.argsort(-values, kind="stable")[:count]
    np.testing.assert_array_equal(found.expert_MK[0].cpu(), order)
    assert_close(found.route_weight_MK[0], wanted[order], 1e-6)
    np.testing.assert_array_equal(found.expert_MK[1].cpu(), np.argsort(-values[::-1], kind="stable")[:count])


@pytest.mark.parametrize("values", [[-1e30, 1e30, 0], [np.inf, 1, 2], [np.nan] * 3], ids=str)
def test_route_of_extremes_stays_inside(device: torch.device, values: list[float]) -> None:
    found = Routing(integers(device, [[-1] * 2]), torch.zeros(1, 2, device=device))
    with np.errstate(invalid="ignore"):
        moe.route(torch.tensor([values], device=device), found)
    assert 0 <= found.expert_MK.min() <= found.expert_MK.max() < 3
    if values[1] == 1e30:
        np.testing.assert_array_equal(found.expert_MK.cpu(), [[1, 2]])
        np.testing.assert_array_equal(found.route_weight_MK.cpu(), [[1, 0]])


@FEW
@given(EXPERTS, WIDTHS, st.data())
def test_expert_neurons(device: torch.device, n_experts: int, width: int, data: st.DataObject) -> None:
    """Rows on the GPU are those of the experts' first neurons, one expert after the other."""
    cuts, expert_K, rng = drawn(n_experts, width, data)
    routing, route_weight_K = routing_of(device, expert_K, rng)
    device_cuts = DeviceCuts.of(cuts, width, torch.zeros(2, n_experts, dtype=torch.int32, device=device))
    on_device = [e * width + i for e in range(n_experts) for i in range(cuts.cut_X[e])]
    wanted = [e * width + i for e in expert_K for i in range(cuts.cut_X[e])]
    found, rows = list_of(device, cuts.hot), integers(device, np.full((1, cuts.hot + 3), -1))
    if cuts.hot:
        moe.list_expert_neurons(routing, device_cuts, found, rows, cold=False)
        count = len(wanted)
        assert found.length_M.item() == count <= cuts.hot
        np.testing.assert_array_equal(rows[0, :count].cpu(), wanted)
        np.testing.assert_array_equal(np.array(on_device)[found.index_MF[0, :count].cpu()], wanted)
        assert (rows[0, count:] == -1).all()
        assert (found.index_MF[0, count:] == -1).all()
        h = normal(rng, cuts.hot)
        weighed = torch.from_numpy(h.copy()).to(device)
        moe.apply_route_weights(found, weighed[None], routing, device_cuts)
        route_weight_X = np.zeros(n_experts, np.float32)
        route_weight_X[expert_K] = route_weight_K
        h[:count] *= route_weight_X[np.array(wanted, int) // width]
        np.testing.assert_array_equal(weighed.cpu(), h)
    cold = list_of(device, cuts.cold)
    if cuts.cold:
        moe.list_expert_neurons(routing, device_cuts, cold, None, cold=True)
        wanted = [e * width + i for e in expert_K for i in range(cuts.cut_X[e], width)]
        assert cold.length_M.item() == len(wanted) <= cuts.cold
        np.testing.assert_array_equal(cold.index_MF[0, : len(wanted)].cpu(), wanted)


@FEW
@given(FORMAT, COLUMNS, EXPERTS, st.sampled_from([1, 7, 33]), TILING, st.data())
@example("q4", 320, 3, 9, Tiling(dot_rows=4, dot_width=64), None)
def test_prediction(
    device: torch.device, fmt: str, columns: int, n_experts: int, rank: int, tiling: Tiling, data: st.DataObject | None
) -> None:
    width, rng = 40, np.random.default_rng(rank)
    expert_K = np.array([2, 0], np.int32)
    if data is not None:
        _, expert_K, _ = drawn(n_experts, width, data)
    routing, _ = routing_of(device, expert_K, rng)
    down = Stored(device, fmt, normal(rng, n_experts * rank, columns))
    up, bias = Stored(device, fmt, normal(rng, n_experts * width, rank)), normal(rng, n_experts * width)
    x = normal(rng, columns)
    r_KR = torch.full((len(expert_K), rank), np.nan, device=device)
    x_MD = torch.from_numpy(x).to(device)[None]
    linear(down.matrix, None, x_MD, r_KR.view(1, -1), tiling, expert_MK=routing.expert_MK)
    wanted_KR = (down.values @ x).reshape(n_experts, rank)[expert_K]
    assert_close(r_KR, wanted_KR)

    # Scores of which none is near 0.
    r_KR = torch.from_numpy(np.round(wanted_KR, 2) + np.float32(0.01)).to(device)
    candidates = np.concatenate([e * width + np.sort(rng.permutation(width)[:11]) for e in expert_K])
    score = np.concatenate(
        [up.values[rows] @ r for rows, r in zip(candidates.reshape(-1, 11), r_KR.cpu().numpy(), strict=True)]
    )
    bias[candidates] = np.where(np.abs(score + bias[candidates]) < 1e-3, 1 - score, bias[candidates])
    room = len(candidates) + 7
    index = integers(device, np.pad(candidates, (0, 7)))
    marks, counts = (
        torch.full((room,), np.nan, device=device),
        torch.full((room,), -1, dtype=torch.int32, device=device),
    )
    bias_F, length_M = torch.from_numpy(bias).to(device), integers(device, [len(candidates)])
    listed, marked = NeuronList.of(index[None], length_M), (marks[None], counts[None])
    tile = predict(up.matrix, bias_F, r_KR.view(1, -1), *marked, tiling, listed, routing.expert_MK, width)
    wanted = score + bias[candidates] > 0
    np.testing.assert_array_equal(marks[: len(candidates)].cpu().numpy() != 0, wanted)
    for t in range(-(-room // tile)):
        assert counts[t] == wanted[t * tile : (t + 1) * tile].sum()


def test_rows_of_a_plan() -> None:
    """The most that a token can ask for."""
    cuts = Cuts.of((64, 0, 70, 7), 70, 2)
    assert (cuts.hot, cuts.cold) == (134, 133)
    assert cuts.base_X == (0, 64, 64, 134)
    assert (Cuts.of((30,), 70, 1).hot, Cuts.of((30,), 70, 1).cold) == (30, 40)
    assert Cuts.of((0, 0), 70, 1).hot == Cuts.of((70, 70), 70, 2).cold == 0
