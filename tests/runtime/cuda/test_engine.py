"""An engine on a GPU gives each request the text that it gets alone, by tokens and their kinds."""

from pathlib import Path

import pytest
from support.gpu_running import SPLIT, model, running

from pi_runtime import Engine, Model, Sampling
from pi_runtime.cuda.memory.devices import Device


@pytest.mark.slow
def test_the_same_text_in_company(tmp_path: Path, gpu: Device) -> None:
    prompts = [[5, 6, 7, 8], [3], [5, 6, 7, 1]]
    settings = {"max_tokens": 2, "sampling": Sampling(temperature=1.0, seed=1)}
    with running(model(tmp_path / "a.pi", n_heads=2), SPLIT, gpu) as executor:
        assert executor._host.artifact is not None
        found = Model(executor._host.artifact, "auto", executor)
        wanted = ["".join(found.generate(prompt, **settings)) for prompt in prompts]
        page = executor.new_pool().page_nbytes
        with Engine(found, slots=2, piece=2, kv_budget=3 * page) as engine:
            streams = [engine.generate(prompt, **settings) for prompt in prompts]
            assert ["".join(stream) for stream in streams] == wanted
            before = engine.stats.cached_tokens
            assert "".join(engine.generate(prompts[2], **settings)) == wanted[2]
            assert engine.stats.cached_tokens > before
