"""Which experts the router takes, and what is counted of them, against NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import load
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.kernels import moe, reference
from pi_runtime.kernels.data import weight_table
from pi_runtime.kernels.data.workspace import allocate_workspace

FEW = settings(max_examples=30, deadline=None, derandomize=True)


def routed(
    router_XD: np.ndarray, taken: int, x_TD: np.ndarray, bias_X: np.ndarray | None = None, **facts: Any
) -> np.ndarray:
    """(T, X) route weights by the kernel."""
    shared = facts.get("experts_shared", 0)
    n_experts, width = len(router_XD) + shared, router_XD.shape[1]
    decoder = small_decoder(d_model=width, n_experts=n_experts, experts_per_token=taken + shared, **facts)
    cfg = weight_table.config_of(decoder, dict.fromkeys(PARTS, "f32"))
    ws, stored = allocate_workspace(decoder, 0), FORMATS["f32"].encode(router_XD)
    w_1 = np.zeros(1, weight_table.LAYER)
    w_1["router"], w_1["experts_chosen"], w_1["experts_shared"] = stored.ctypes.data, taken, shared
    w_1["router_choice_bias"] = 0 if bias_X is None else bias_X.ctypes.data
    moe.route(cfg, w_1[0], x_TD, ws)
    route_weight_TX = np.zeros((len(x_TD), n_experts), np.float32)
    np.put_along_axis(route_weight_TX, ws.expert_TK[: len(x_TD)], ws.route_weight_TK[: len(x_TD)], 1)
    return route_weight_TX


class _Router(dict[str, np.ndarray]):
    """A layer's weights, of which routing asks for the router alone."""

    def product(self, name: str, x_TD: np.ndarray) -> np.ndarray:
        return x_TD @ self[name].T


ROUTERS: list[dict[str, Any]] = [
    {},
    {"router_normalised": False},
    {"router_score": "sigmoid"},
    {"router_score": "sigmoid", "router_normalised": False, "router_scale": 2.5},
]


@FEW
@given(st.integers(2, 9), st.integers(1, 20), st.integers(1, 20), st.data())
def test_route_weights_are_those_of_the_definition(
    n_experts: int, width: int, tokens: int, data: st.DataObject
) -> None:
    taken = data.draw(st.integers(1, n_experts))
    rng = np.random.default_rng(width)
    # Small whole numbers: sums are exact, and many are equal.
    router_XD, x_TD = (rng.integers(-1, 2, (n, width)).astype(np.float32) for n in (n_experts, tokens))
    facts = data.draw(st.sampled_from(ROUTERS))
    decoder = small_decoder(d_model=width, n_experts=n_experts, experts_per_token=taken, **facts)
    wanted = reference.routing(decoder, _Router({"ffn/router": router_XD}), x_TD)
    found = routed(router_XD, taken, x_TD, **facts)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(found > 0, wanted > 0)


@FEW
@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2), st.integers(1, 20), st.data())
def test_a_bias_chooses_in_groups_and_does_not_weigh(
    groups: int, size: int, shared: int, tokens: int, data: st.DataObject
) -> None:
    width, most = 5, data.draw(st.integers(1, groups))
    taken = data.draw(st.integers(1, most * size))
    rng = np.random.default_rng(tokens)
    router_XD, x_TD = (rng.integers(-1, 2, (n, width)).astype(np.float32) for n in (groups * size, tokens))
    bias_X = rng.integers(-2, 3, groups * size).astype(np.float32)
    facts: dict[str, Any] = {"router_score": "sigmoid", "router_choice_bias": True, "experts_shared": shared}
    facts |= {"router_groups": groups, "router_groups_taken": most}
    sizes = {"d_model": width, "n_experts": groups * size + shared, "experts_per_token": taken + shared}
    weights = _Router({"ffn/router": router_XD, "ffn/router_choice_bias": bias_X})
    wanted = reference.routing(small_decoder(**sizes, **facts), weights, x_TD)
    found = routed(router_XD, taken, x_TD, bias_X=bias_X, **facts)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(found[:, groups * size :], 1)


def test_values_far_apart_give_all_to_one() -> None:
    route_weight_TX = routed(np.array([[-1e30], [1e30], [0]], np.float32), 2, np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(route_weight_TX, [[0, 1, 0]])


@pytest.mark.parametrize("device", ["cpu", "stand-in"])
def test_counts_are_sums_over_the_experts_taken(device: str, tmp_path: Path) -> None:
    decoder = small_decoder(n_experts=4, experts_per_token=2, d_ff=30)
    layers = Layer(rung="predicted", rank=3), Layer(rung="gate")
    plan = stored_plan((10, 0, 30, 5, 0, 0, 0, 30), 1000, 900, attention=("cpu", "cpu"))
    path = random_artifact(tmp_path / "a.pi", decoder, ranks=[3, None], layers=layers, plans=(plan,))
    ids = [5, 80, 17, 200]
    wanted = counted(path, ids)
    with load(path, device=device) as model:
        assert model.executor.neurons == 2 * 4 * 30
        cache = model.new_cache()
        steps = np.stack([model.decode(token, cache)[1] for token in ids])
        np.testing.assert_array_equal(model.examine(ids)[1], wanted)
    np.testing.assert_array_equal(steps.sum(0), wanted[:, 1:])


def counted(path: Path, ids: list[int]) -> np.ndarray:
    """(layers, 3) by the definition: neurons of the experts taken that fire, are read, and both."""
    found = []
    with Artifact.open(path) as artifact:
        d = artifact.manifest.decoder
        x_TD = artifact.values("embedding")[ids]
        for n, layer in enumerate(artifact.manifest.layers):
            w = reference.ArtifactWeights(artifact, f"layers/{n}/")
            attended_TD = x_TD + reference.attention(d, w, reference.norm(d, w, "attention/norm", x_TD))
            normed_TD = reference.norm(d, w, "ffn/norm", attended_TD)
            taken_TF = np.repeat(reference.routing(d, w, normed_TD) > 0, d.d_ff, axis=1)
            chosen = reference.selected(w, layer, normed_TD)
            fire_TF = taken_TF & (w.product("ffn/first", normed_TD) > 0)
            read_TF = taken_TF & (True if chosen is None else chosen)
            found.append((fire_TF.sum(), read_TF.sum(), (fire_TF & read_TF).sum()))
            x_TD = reference.block(d, w, layer, x_TD)
    return np.array(found)
