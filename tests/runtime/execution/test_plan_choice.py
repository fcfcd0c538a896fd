"""One rule chooses a stored plan, and what it counts is what a run prints and allocates."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import console, load
from pi_runtime.artifact.buffers import Buffers, kv_cache
from pi_runtime.artifact.gpu_buffers import WEIGHT_ALIGN, gpu_products, gpu_prompt_block, gpu_workspace, weight_chunk
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.schema import Layer, Manifest, Plan
from pi_runtime.commands.run import app
from pi_runtime.errors import DoesNotFitError, UsageError, size
from pi_runtime.execution.plan_choice import Allocation, allocation, choose_plan, needed_bytes
from pi_runtime.execution.plan_layout import placed_arrays

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"n_layers": 4, "d_ff": 200, "context_length": 512},
    "experts": {"n_layers": 2, "d_ff": 200, "context_length": 512, "n_experts": 3, "experts_per_token": 2},
}
SIDES = (("cpu", "gpu"), ("gpu", "gpu"))


def ladder(shape: dict[str, Any]) -> list[Plan]:
    """Plans of rising size: no attention on the GPU, some, and all, with rising cuts."""
    layers, experts = shape["n_layers"], shape.get("n_experts", 1)
    return [
        stored_plan(
            tuple((cut + 64 * e) % 201 for _ in range(layers) for e in range(experts)),
            vram_bytes=1 << 40,
            used_bytes=1,
            attention=("gpu",) * on_gpu + ("cpu",) * (layers - on_gpu),
            head=head,
        )
        for cut, on_gpu, head in ((8, 0, "cpu"), (64, 1, "cpu"), (70, layers // 2, "gpu"), (136, layers, "gpu"))
    ]


@pytest.fixture(params=SHAPES, scope="module")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = SHAPES[request.param]
    layers = [Layer(rung="predicted", rank=5 + n) for n in range(shape["n_layers"])]
    return random_artifact(
        tmp_path_factory.mktemp("plans") / f"{request.param}.pi", small_decoder(**shape), format="q4",
        ranks=[layer.rank for layer in layers], layers=tuple(layers), plans=ladder(shape),
    )  # fmt: skip


@pytest.fixture
def manifest(path: Path) -> Manifest:
    with Artifact.open(path) as artifact:
        return artifact.manifest


def allocated(table: Buffers) -> int:
    """Bytes of arrays made as a table says."""
    return sum(buffer.in_ram().nbytes for buffer in table.values())


def allocated_for(manifest: Manifest, taken: Allocation) -> int:
    """Bytes of everything that a run on a GPU makes, each array for itself."""
    d, arrays, plan = manifest.decoder, manifest.arrays, taken.plan
    stored = [name for name in arrays if not name.endswith(("/order", "/counts"))]
    total = sum(array.nbytes for array in placed_arrays(manifest, plan)) + WEIGHT_ALIGN * len(stored)
    on_gpu = plan.attention.count("gpu")
    total += kv_cache(d, manifest.formats["attention"], taken.context, on_gpu).in_ram().nbytes
    for table in (
        gpu_workspace(d, max(layer.rank or 0 for layer in manifest.layers), taken.context, taken.batch_tokens),
        gpu_prompt_block(d, taken.block_tokens),
        gpu_products(d, taken.block_tokens),
    ):
        total += allocated(table)
    return total + (2 * allocated(weight_chunk(arrays, d)) if taken.streamed else 0)


def test_printed_planned_and_allocated_bytes_are_equal(
    path: Path, manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 budgets, from too small to more than enough, and contexts; `pi-run` prints the figure of the rule."""
    rng, refused = np.random.default_rng(0), 0
    chosen = set()
    for _ in range(30):
        context = int(rng.integers(2, manifest.decoder.context_length + 1))
        needed = [needed_bytes(manifest, plan, context) for plan in manifest.plans]
        budget = int(rng.integers(min(needed) // 2, 3 * max(needed)))
        if budget < min(needed):
            refused += 1
            with pytest.raises(DoesNotFitError, match=f"at least {min(needed)} bytes"):
                load(path, vram_budget=budget, context=context)
            continue
        with Artifact.open(path) as artifact:
            planned = choose_plan(artifact, context, budget)
        assert planned.total == allocated_for(manifest, planned) <= budget
        arguments = [str(path), "-p", "a", "-n", "1", "--device", "stand-in", "--ctx-size", str(context), "--stats"]
        assert console.run(app, [*arguments, "--vram-budget", f"{budget}B"]) == 0
        said = capsys.readouterr().err
        assert re.search(r"gpu_bytes +(\d+)", said)[1] == str(planned.total)  # type: ignore[index]
        assert f" {size(planned.total)} used" in said
        chosen.add(planned.plan)
    assert 0 < refused < 15
    assert len(chosen) > 2


def test_the_plan_that_uses_most_of_the_budget(path: Path, manifest: Manifest) -> None:
    """Each plan from the budget on that it needs, and the next one only from its own on."""
    for context in (2, 63, 64, 512):
        needed = [needed_bytes(manifest, plan, context) for plan in manifest.plans]
        assert needed == sorted(set(needed))
        for n, nbytes in enumerate(needed):
            for budget, wanted in ((nbytes, n), (nbytes - 1, n - 1), (nbytes + 1, n)):
                if wanted >= 0:
                    with load(path, vram_budget=budget, context=context) as model:
                        assert model.plan == manifest.plans[wanted]
    with load(path, device="stand-in") as model:
        assert model.plan == manifest.plans[-1]
    with pytest.raises(UsageError, match="device='cpu'"):
        load(path, device="cpu", vram_budget=98)


def test_a_longer_cache_counts_against_the_budget(manifest: Manifest) -> None:
    """With 2 key-value heads of 8 in float16 a position takes 64 bytes in each layer on the GPU, and 32 of angles.

    Each page of 32 positions has an entry of 8 bytes in a table.
    """
    for plan in manifest.plans:
        a_page = 32 * (64 * plan.attention.count("gpu") + 32) + 8
        assert needed_bytes(manifest, plan, 512) - needed_bytes(manifest, plan, 128) == 12 * a_page


def test_the_rest_of_the_budget_goes_to_prompts(manifest: Manifest) -> None:
    """Larger blocks, and streamed weights from blocks of 64 tokens on; never more than the budget."""
    plan = manifest.plans[0]
    least = needed_bytes(manifest, plan, 64)
    found = [allocation(manifest, plan, 64, budget) for budget in range(least, 1 << 25, 1 << 17)]
    assert all(a.total <= a.budget for a in found)
    assert all(a.block_tokens >= 64 for a in found if a.streamed)
    first, last = found[0], found[-1]
    assert (first.block_tokens, first.streamed, last.block_tokens, last.streamed > 0) == (1, 0, 512, True)
    whole = replace(plan, cuts=(manifest.decoder.d_ff,) * len(plan.cuts))
    assert allocation(manifest, whole, 64, 1 << 40).streamed == 0


def test_an_error_names_the_smallest_budget_and_what_helps(path: Path, manifest: Manifest) -> None:
    least, shorter = (min(needed_bytes(manifest, plan, context) for plan in manifest.plans) for context in (512, 64))
    with Artifact.open(path) as artifact:
        helps = rf"at least {least} bytes(?s:.)*vram_budget={least}, device='cpu'"
        with pytest.raises(DoesNotFitError, match=helps):
            choose_plan(artifact, 512, shorter - 1)
        with pytest.raises(DoesNotFitError, match=rf"vram_budget={least}, context=64, device='cpu'"):
            choose_plan(artifact, 512, shorter)
        with pytest.raises(DoesNotFitError, match=r"5 bytes, all that the GPU has free\n.*try: device='cpu'") as e:
            choose_plan(artifact, 512, 1 << 40, free=5)
    assert e.value.exit_code == 4


def test_a_built_artifact_without_a_placement_names_its_machine(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder(), profiled=True, recipe={"place": {"machine": "laptop"}})
    with pytest.raises(DoesNotFitError) as refused:
        load(path, device="stand-in")
    assert "'laptop'" in refused.value.what
    assert "set [place] machine" not in str(refused.value)
    assert 'machine = "stand-in"' in str(refused.value.remedy)


def test_without_a_placement_a_budget_is_refused(tmp_path: Path) -> None:
    path = random_artifact(tmp_path / "a.pi", small_decoder())
    for arguments in ({"vram_budget": 10**9}, {"device": "stand-in"}):
        with pytest.raises(DoesNotFitError, match="holds no placement"):
            load(path, **arguments)
