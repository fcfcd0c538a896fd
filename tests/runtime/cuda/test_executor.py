"""GPU and CPU give by any plan what the CPU alone gives; Triton's interpreter may stand in for the GPU."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gpu_running import (
    ALL_ON_GPU,
    CONTEXT,
    LAYERS,
    NEURONS,
    OTHERS,
    SPLIT,
    assert_same,
    assert_same_answers,
    decoded,
    model,
    plan_of,
    read,
    running,
)  # fmt: skip
from support.long_form import marked_long
from support.steps import step

from pi_runtime.artifact.reader import Artifact
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.errors import PiError, UsageError
from pi_runtime.execution.host_executor import in_memory
from pi_runtime.execution.kv_cache import KVCache
from pi_runtime.kernels import reference

SIDES = {"cpu": ["cpu"] * LAYERS, "gpu": ["gpu"] * LAYERS, "mixed": ["gpu", "cpu", "gpu"]}
CUTS = {"none": (0, 0, 0), "some": (128, 64, 70), "all": (NEURONS,) * LAYERS, "uneven": (0, NEURONS, 64)}
CASES = (
    ("llama", "cpu", "none", "cpu-cpu"),
    ("llama", "cpu", "some", "gpu-cpu"),
    ("llama", "gpu", "some", "gpu-gpu"),
    ("llama", "mixed", "uneven", "cpu-gpu"),
    ("opt", "cpu", "all", "cpu-gpu"),
    ("opt", "gpu", "all", "gpu-gpu"),
    ("opt", "gpu", "none", "gpu-cpu"),
    ("opt", "mixed", "some", "gpu-gpu"),
)
PROMPT, GOING_ON = [5, 9, 250, 3], [7, 11]


@pytest.mark.parametrize("case", marked_long(CASES, CASES[::2]), ids="-".join)
def test_any_plan_gives_what_the_cpu_gives(case: tuple[str, ...], tmp_path: Path, gpu: Device) -> None:
    family, sides, cuts, ends = case
    path = model(tmp_path / "a.pi", family)
    one = in_memory(Artifact.open(path), "auto", CONTEXT, 1)
    with running(path, plan_of(SIDES[sides], CUTS[cuts], ends), gpu) as two:
        wanted_rows, rows = assert_same_answers(one, two, PROMPT, GOING_ON)
    one.close()
    np.testing.assert_array_equal(rows, wanted_rows)


FORMS: dict[str, dict[str, Any]] = {
    "shared norm, partial rotary": {
        "block": "parallel", "shared_norm": True, "ffn": "plain", "activation": "gelu_tanh", "norm": "layer",
        "rotary_frequencies": (1.0, 0.1), "ffn_bias": True, "qkv_bias": True, "head_bias": True,
    },
    "parallel": {"block": "parallel", "ffn": "plain", "activation": "gelu", "norm": "layer"},
    "query and key norms, drelu": {"qk_norm": True, "activation": "drelu", "rotary_scale": 1.5},
    "joint norms of queries and keys": {"qk_norm": True, "joint_qk_norm": True},
    "norms after each part": {"block": "reordered", "n_layers": 3},
    "scaled, normed, capped, turned back, without rotation in a layer": {
        "embedding_scale": 3.0, "embedding_norm": True, "logit_scale": 0.7, "logit_softcap": 0.9,
        "rotary_frequencies": (-1.0, -0.1), "unrotated_layers": (1,),
    },
    "squares above a threshold": {"activation": "relu2", "threshold": 0.2},
    "silu": {"activation": "silu"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_a_decoder(form: dict[str, Any], tmp_path: Path, gpu: Device) -> None:
    assert_follows_the_definition(model(tmp_path / "a.pi", **form), gpu)


def test_post_norm_and_a_narrow_embedding(tmp_path: Path, gpu: Device) -> None:
    form = {"block": "post-norm", "final_norm": False, "d_embedding": 24}
    assert_follows_the_definition(model(tmp_path / "a.pi", "opt", **form), gpu)


def assert_follows_the_definition(path: Path, gpu: Device, error: float = 1e-4) -> None:
    with Artifact.open(path) as artifact, running(path, ALL_ON_GPU, gpu) as executor:
        ids = [*PROMPT, *GOING_ON]
        dense = reference.forward(artifact, ids[:5], "dense")
        cache = executor.new_cache()
        assert_same(read(executor, cache, ids[:5]), dense[-1], error)
        cache = executor.new_cache()
        assert_same(decoded(executor, cache, ids)[0], reference.forward(artifact, ids, "predicted"), error)


@pytest.mark.parametrize("fmt", marked_long(["f16", "bf16", "q8", "q4"], ["f16", "q8"]))
def test_number_formats(fmt: str, tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU inputs are not rounded to bytes."""
    monkeypatch.setattr(reference, "rounded", lambda x_TD: x_TD)
    path = model(tmp_path / "a.pi", "llama", fmt)
    with Artifact.open(path) as artifact, running(path, ALL_ON_GPU, gpu) as executor:
        cache = executor.new_cache()
        found, _ = decoded(executor, cache, GOING_ON)
        assert_same(found, reference.forward(artifact, GOING_ON, "predicted"))
        # Prompts are multiplied in 16 bits.
        prompt = read(executor, executor.new_cache(), PROMPT)
        wanted = reference.forward(artifact, PROMPT, "dense")[-1]
        assert np.abs(prompt - wanted).max() <= 0.02 * np.abs(wanted).max()


def test_cold_weights_are_streamed_for_a_long_prompt(tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi")
    found = []
    for stream_from in (4, 5):
        with running(path, SPLIT, gpu, stream_from=stream_from) as executor:
            found.append(read(executor, executor.new_cache(), PROMPT))
    assert_same(found[0], found[1])
    assert (found[0] != found[1]).any(), "other additions, other bits"


@pytest.mark.parametrize("mode", ["dense", "gate"])
def test_modes(mode: str, tmp_path: Path, gpu: Device) -> None:
    path = model(tmp_path / "a.pi")
    one = in_memory(Artifact.open(path), mode, CONTEXT, 1)
    with running(path, SPLIT, gpu, mode) as two:
        (wanted, wanted_rows), (found, rows) = (decoded(e, two.new_cache(), GOING_ON) for e in (one, two))
    one.close()
    assert_same(found, wanted)
    np.testing.assert_array_equal(rows, wanted_rows)


@pytest.mark.parametrize("sides", ["gpu", "cpu"])
def test_the_other_rungs(sides: str, tmp_path: Path, gpu: Device) -> None:
    """Signs, a threshold of the layer's, and dense."""
    path, plan = model(tmp_path / "a.pi", layers=OTHERS), plan_of(SIDES[sides], CUTS["some"])
    one = in_memory(Artifact.open(path), "auto", CONTEXT, 1)
    with running(path, plan, gpu) as two:
        (wanted, wanted_rows), (found, rows) = (decoded(e, two.new_cache(), GOING_ON) for e in (one, two))
    one.close()
    assert_same(found, wanted)
    np.testing.assert_array_equal(rows, wanted_rows)
    assert 0 < rows[0, 0, 0] < NEURONS


def test_two_sequences_in_turn(tmp_path: Path, gpu: Device) -> None:
    """The GPU holds the cache of one sequence at a time."""
    with running(model(tmp_path / "a.pi"), SPLIT, gpu) as executor:

        def new() -> KVCache:
            return executor.new_cache()

        alone = [decoded(executor, new(), ids)[0] for ids in ([1, 2], [9, 8])]
        caches, in_turn = [new(), new()], [[], []]  # type: ignore[var-annotated]
        for part in (slice(0, 1), slice(1, 2)):
            for n, ids in enumerate(([1, 2], [9, 8])):
                in_turn[n].append(decoded(executor, caches[n], ids[part])[0])
        np.testing.assert_array_equal(np.concatenate(in_turn[0]), alone[0])
        np.testing.assert_array_equal(np.concatenate(in_turn[1]), alone[1])
        # Logits at every position continue from the GPU's cache.
        every = step(executor, [5], caches[1], select=True, logits="all").logits_TV
        wanted = decoded(executor, new(), [9, 8, 5])[0]
        assert_same(every, wanted[-1:])


def test_pages_that_others_share_hold_what_the_gpu_computed(tmp_path: Path, gpu: Device) -> None:
    with running(model(tmp_path / "a.pi"), SPLIT, gpu) as executor:
        ids, going_on = [3 + n % 40 for n in range(34)], [7, 8]
        alone, cache = (executor.new_cache() for _ in range(2))
        wanted = decoded(executor, alone, [*ids, *going_on])[0][-2:]
        decoded(executor, cache, ids)
        fork = cache.fork()
        decoded(executor, cache, [1])
        np.testing.assert_array_equal(decoded(executor, fork, going_on)[0], wanted)
        cache.truncate(34)
        np.testing.assert_array_equal(decoded(executor, cache, going_on)[0], wanted)
        assert cache.pages[0] == fork.pages[0]


@pytest.mark.parametrize("kind", ["gpu", "cold", "wait"])
def test_a_fault_on_either_side_surfaces_and_the_executor_still_works(kind: str, tmp_path: Path, gpu: Device) -> None:
    def fail() -> None:
        raise RuntimeError(f"{kind} broke")

    with running(model(tmp_path / "a.pi"), SPLIT, gpu) as executor:
        wanted = decoded(executor, executor.new_cache(), [5])[0]
        whole = executor._schedules[1]
        executor._schedules[1] = replace(whole, runs=tuple(fail if c.kind == kind else c.run for c in executor.calls))
        cache = executor.new_cache()
        with pytest.raises(RuntimeError, match=f"{kind} broke"):
            decoded(executor, cache, [5])
        assert cache.tokens == (), "a token that failed is in the cache"
        executor._schedules[1] = whole
        np.testing.assert_array_equal(decoded(executor, cache, [5])[0], wanted)


@pytest.mark.parametrize("kind", ["gpu", "wait"])
def test_a_gpu_that_fails_is_one_clear_error_and_can_be_closed(
    kind: str, tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider …")

    with running(model(tmp_path / "a.pi"), SPLIT, gpu) as executor, monkeypatch.context() as patch:
        runs = tuple(fail if call.kind == kind else call.run for call in executor.calls)
        executor._schedules[1] = replace(executor._schedules[1], runs=runs)
        patch.setattr(gpu, "synchronize", fail)
        with pytest.raises(PiError, match=r"the GPU failed\n.*illegal memory access was encountered\n.*device='cpu'"):
            decoded(executor, executor.new_cache(), [5])
        executor.close()


def test_a_closed_executor_refuses(tmp_path: Path, gpu: Device) -> None:
    with running(model(tmp_path / "a.pi"), ALL_ON_GPU, gpu) as executor:
        cache = executor.new_cache()
        memory = weakref.ref(executor.device_ops.weights)
        executor.close()
        assert memory() is None, "the GPU's memory is still held"
        with pytest.raises(UsageError, match="closed"):
            decoded(executor, cache, [5])
