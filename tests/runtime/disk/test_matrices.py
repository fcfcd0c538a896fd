"""Whole matrices that come from disk give the bits of a run in memory, in any formats, budget and company."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_models import within
from support.synthetic import FACTS, random_artifact, small_decoder

from pi_runtime import Model
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rows import useful_budgets
from pi_runtime.artifact.schema import Layer, Text
from pi_runtime.errors import ArtifactError, DoesNotFitError
from pi_runtime.execution.disk_matrices import DiskMatrices
from pi_runtime.execution.executor import SequenceStep
from pi_runtime.execution.host_executor import HostExecutor
from pi_runtime.kernels import reference

LAYERS, CONTEXT = 8, 160
PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 257, 140)]
SHARED = "shared experts, dense layers, a bias for choosing in groups"
PIECES = {
    "shared and dense": FACTS[SHARED] | {"dense_layers": (0, 2), "n_layers": 4, "experts_shared": 2, "n_experts": 6},
    "dense layers": FACTS[SHARED] | {"n_layers": 3, "experts_shared": 0, "n_experts": 4, "experts_per_token": 2},
    "a gate": FACTS["states, gated attention, a shared expert with a gate"],
    "layers without an FFN": FACTS["a mixer or an FFN alone, states of Mamba-2 without positions"],
}
"""Decoders with more in a layer, or less, than experts that are alike."""
MIXED = {"layers/1/ffn/up": "q4_k", "layers/3/ffn/down": "q4_k", "layers/4/ffn/first": "q5_k"}


def artifact(
    folder: Path, fmt: str, experts: int, matrices: dict[str, str] | None = None, d_ff: int = 512, **facts: Any
) -> Path:
    shape: dict[str, Any] = {
        "d_model": 256,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 64,
        "d_ff": d_ff,
        "n_layers": LAYERS,
    }
    routed = {"n_experts": experts, "experts_per_token": min(2, experts)}
    decoder = small_decoder(**shape, **routed, activation="silu", context_length=CONTEXT, **facts)
    return random_artifact(
        folder / "model.pi", decoder, format=fmt, matrices=matrices, seed=3, scale=3.0, ffn_layout="matrices",
        layers=(Layer(rung="dense"),) * LAYERS, text=Text(prefix_ids=(), end_ids=()),
    )  # fmt: skip


def in_pieces(folder: Path, kind: str, fmt: str, matrices: dict[str, str] | None = None) -> Path:
    """One whose shared experts and dense layers are whole."""
    decoder = small_decoder(**{"activation": "silu", "context_length": CONTEXT, **PIECES[kind]}).uncut()
    return random_artifact(
        folder / "model.pi", decoder, format=fmt, matrices=matrices, seed=3, scale=3.0, ffn_layout="matrices",
        layers=(Layer(rung="dense"),) * decoder.n_layers, text=Text(prefix_ids=(), end_ids=()),
    )  # fmt: skip


def rows_of(model: Model) -> DiskMatrices:
    assert isinstance(model.executor, HostExecutor)
    assert isinstance(model.executor.rows, DiskMatrices)
    return model.executor.rows


def outputs(model: Model) -> list[np.ndarray]:
    """Logits of a long prompt, of tokens one by one, and of two sequences together; and what they counted."""
    found = [model.logits(PROMPT[:100]), *model.examine(PROMPT[:12])]
    cache = model.new_cache()
    found += [array for token in PROMPT[:3] for array in model.decode(token, cache)]
    caches = [model.new_cache() for _ in range(2)]
    for count in (3, 30):
        steps = [
            SequenceStep(cache=cache, tokens=np.array(PROMPT[:n], np.int64), select=select)
            for cache, n, select in zip(caches, (2, count), (True, False), strict=True)
        ]
        found += [result.logits_TV for result in model.executor.step(steps)]
    return [*found, read(model)]


def read(model: Model) -> np.ndarray:
    """The logits behind a prompt that is read in pieces, as long as a layer takes them together."""
    cache, size = model.new_cache(), model.executor.block_tokens
    for first in range(0, len(PROMPT), size):
        step = SequenceStep(cache=cache, tokens=np.array(PROMPT[first : first + size], np.int64), select=False)
        (result,) = model.executor.step([step])
    return result.logits_TV


@pytest.mark.parametrize(
    ("fmt", "matrices", "d_ff"), [("q6_k", MIXED, 512), ("q5", None, 352), ("f16", {"layers/2/ffn/down": "q8"}, 96)]
)
@pytest.mark.parametrize("experts", [1, 5])
def test_bits(tmp_path: Path, fmt: str, matrices: dict[str, str] | None, d_ff: int, experts: int) -> None:
    path = artifact(tmp_path, fmt, experts, matrices, d_ff)
    with within(path, None, context=CONTEXT) as model:
        expected = outputs(model)
    for budget, threads in (("least", 1), ("half", 2), ("all", 1)):
        with within(path, budget, threads, CONTEXT) as model:
            for found, wanted in zip(outputs(model), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


def assert_close(found_TV: np.ndarray, wanted_TV: np.ndarray) -> None:
    """Some inputs may be rounded to the next integer of a block."""
    apart_TV = np.abs(found_TV - wanted_TV) / np.abs(wanted_TV).max()
    assert (np.median(apart_TV) < 1e-5, apart_TV.max() < 1e-2) == (True, True)


@pytest.mark.parametrize("fmt", ["f32", "q8"])
@pytest.mark.parametrize("kind", PIECES)
def test_what_every_token_needs_stays(tmp_path: Path, kind: str, fmt: str) -> None:
    """Shared experts and dense layers are no units, nor are layers without an FFN. All is computed as it is defined,
    and the bits are those in memory."""
    path = in_pieces(tmp_path, kind, fmt)
    with Artifact.open(path) as opened, within(path, None, context=CONTEXT) as model:
        d, wanted_TV = opened.manifest.decoder, reference.forward(opened, PROMPT[:40], "dense")
        assert_close(model.logits(PROMPT[:40]), wanted_TV)
        expected = outputs(model)
    alike = d.n_experts - (d.experts_shared > 0)
    count = alike * (d.n_layers - len(d.dense_layers) - len(d.mixer_only_layers))
    for budget, threads in (("least", 1), ("half", 2), ("all", 1)):
        with within(path, budget, threads, CONTEXT) as model:
            slots = rows_of(model).plan.slots
            assert rows_of(model).are_in_memory == (budget == "all") == (slots == count)
            for found, wanted in zip(outputs(model), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("fmt", ["q4_k", "f16"])
def test_bits_of_layers_of_two_widths_with_an_embedding_of_each(tmp_path: Path, fmt: str) -> None:
    windows: dict[str, Any] = {"window": 40, "windowed_layers": (0, 2, 6)}
    keys: dict[str, Any] = {"shared_key_layers": (6, 7), "narrow_ff": 256, "layer_embedding": 256}
    path = artifact(tmp_path, fmt, 1, block="sandwich", tied_head=True, **windows, **keys)
    with within(path, None, context=CONTEXT) as model:
        expected = outputs(model)
    for budget, threads in (("least", 1), ("half", 2)):
        with within(path, budget, threads, CONTEXT) as model:
            for found, wanted in zip(outputs(model), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)


def test_a_shared_expert_may_have_blocks_where_others_have_floats(tmp_path: Path) -> None:
    """Inputs are then prepared for both."""
    names = {f"layers/{n}/ffn/shared_{part}": "q8" for n in (1, 3) for part in ("first", "up", "down")}
    path = in_pieces(tmp_path, "shared and dense", "f16", names)
    with Artifact.open(path) as opened, within(path, "half", context=CONTEXT) as model:
        wanted_TV = reference.forward(opened, PROMPT[:20], "dense")
        assert_close(model.logits(PROMPT[:20]), wanted_TV)


@pytest.mark.parametrize("budget", ["half", "all"])
def test_each_token_of_a_step_is_counted(tmp_path: Path, budget: str) -> None:
    with within(artifact(tmp_path, "q8", 5), budget, 1, CONTEXT) as model:
        caches = [model.new_cache() for _ in range(3)]
        steps = [SequenceStep(cache=cache, tokens=np.array(PROMPT[:1]), select=True) for cache in caches]
        model.executor.step(steps)
        found = model.executor.disk
    assert found is not None
    assert (found.tokens, found.hits + found.misses) == (3, 3 * LAYERS * 2 * 512)
    assert (found.misses > 0) == (budget == "half")


def test_uses_count_less_after_each_step_with_prompts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with within(artifact(tmp_path, "q8", 5), "half", 1, CONTEXT) as model:
        aged: list[int] = []
        monkeypatch.setattr(rows_of(model).store.heat, "age", lambda: aged.append(len(aged)))
        read(model)
        steps = -(-len(PROMPT) // model.executor.block_tokens)
        cache = model.new_cache()
        for token in PROMPT[:3]:
            model.decode(token, cache)
    assert len(aged) == steps + 3


def test_a_piece_of_a_prompt_reads_each_expert_once(tmp_path: Path) -> None:
    path = artifact(tmp_path, "f16", 5)
    with within(path, None, context=CONTEXT) as model:
        expected = read(model)
    with within(path, "half", 2, CONTEXT) as model:
        assert model.executor.block_tokens >= len(PROMPT)
        before = rows_of(model).reader.bytes_read
        np.testing.assert_array_equal(read(model), expected)
        units = LAYERS * 5 * (3 * 2 * 256 * 512)
        assert rows_of(model).reader.bytes_read - before <= 1.02 * units


def test_layers_that_stay_are_read_once(tmp_path: Path) -> None:
    """Of eight layers in six slots three stay, and five are read for each token."""
    path = artifact(tmp_path, "q8", 1)
    with within(path, "half", 1, CONTEXT) as model:
        slots, cache = rows_of(model).plan.slots, model.new_cache()
        for token in PROMPT[:3]:
            model.decode(token, cache)
        before = model.executor.disk
        for token in PROMPT[:5]:
            model.decode(token, cache)
        assert before is not None
        assert model.executor.disk is not None
        found = model.executor.disk - before
    assert 3 < slots < LAYERS
    assert (found.misses, found.hits) == (5 * 512 * (LAYERS - slots + 3), 5 * 512 * (slots - 3))


def test_nothing_is_read_where_all_have_a_place(tmp_path: Path) -> None:
    with within(artifact(tmp_path, "q8", 5), "all", 1, CONTEXT) as model:
        read = rows_of(model).reader.bytes_read
        model.logits(PROMPT[:9])
        assert rows_of(model).reader.bytes_read == read
        assert rows_of(model).are_in_memory


def test_a_budget_below_two_slots_is_refused(tmp_path: Path) -> None:
    path = artifact(tmp_path, "q8", 5)
    with within(path, "least", 1, CONTEXT) as model:
        least, _ = useful_budgets(model.manifest, rows_of(model).plan.fixed)
        assert rows_of(model).plan.slots == 2
    with pytest.raises(DoesNotFitError, match="too small to run it") as caught:
        within(path, "least", 1, CONTEXT, less=1)
    assert str(least) in str(caught.value)


def test_a_step_after_one_that_failed_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact(tmp_path, "q8", 5)
    with within(path, None, 1, CONTEXT) as model:
        expected = model.logits(PROMPT[:9])
    with within(path, "half", 1, CONTEXT) as model:
        model.logits(PROMPT[:3])
        reader = rows_of(model).reader
        with monkeypatch.context() as patched:

            def failing(_batch: int) -> None:
                raise ArtifactError("the disk is gone")

            patched.setattr(reader, "wait", failing)
            with pytest.raises(ArtifactError, match="the disk is gone"):
                model.logits(PROMPT[20:29])
        np.testing.assert_array_equal(model.logits(PROMPT[:9]), expected)
