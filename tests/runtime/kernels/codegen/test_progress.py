"""Every layer of every step says that work goes on, wherever the model runs."""

from pathlib import Path

import pytest
from support.disk_models import from_disk
from support.synthetic import random_artifact, small_decoder, stored_plan

from pi_runtime import Model, load
from pi_runtime.kernels.codegen.threads import advance_progress, progress_count

LAYERS = 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = small_decoder(d_model=64, d_ff=2500, n_layers=LAYERS, context_length=160)
    plan = stored_plan((16,) * LAYERS, 1 << 20, 20000, context=160)
    return random_artifact(tmp_path_factory.mktemp("a") / "a.pi", decoder, ranks=[4, None, 6], plans=(plan,))


@pytest.mark.parametrize("where", ["cpu", "stand-in", "disk"])
def test_each_layer_of_a_step_counts(path: Path, where: str) -> None:
    model: Model = from_disk(path, 0.2, block_tokens=1024) if where == "disk" else load(path, device=where)
    with model:
        for tokens in (1, 20, 130):
            before, cache = progress_count(), model.new_cache()
            model.logits([1] * tokens, last=1, cache=cache)
            between = progress_count()
            assert between - before >= LAYERS * -(-tokens // 64)
            model.decode(2, cache)
            assert progress_count() - between >= LAYERS


def test_what_is_no_kernel_counts_too() -> None:
    before = progress_count()
    advance_progress()
    assert progress_count() == before + 1
