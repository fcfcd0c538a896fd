"""What is listed as kept from a GPU's caches is what the GPU keeps."""

from pathlib import Path

import numpy as np
import pytest
from support.gpu_running import SPLIT, model, running

from pi_runtime import Model
from pi_runtime.commands.bench import sequences
from pi_runtime.commands.bench.kept_neurons import KeptNeurons
from pi_runtime.commands.bench.sequences import Sequences
from pi_runtime.cuda.memory.devices import Device
from pi_runtime.execution.executor import SequenceResult, SequenceStep


@pytest.mark.slow
def test_sequences_on_a_gpu(tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "LEAD", 2)
    monkeypatch.setattr(sequences, "STEPS", 2)
    path = model(tmp_path / "a.pi", n_heads=2)
    with running(path, SPLIT, gpu) as executor:
        assert executor._host.artifact is not None
        found = Model(executor._host.artifact, "auto", executor)
        kept = KeptNeurons(path, "auto", context=executor.context, threads=1, cache_format="auto")
        some = Sequences(found, kept)
        some.grow(2)
        results: list[SequenceResult] = []
        step = executor.step

        def recorded(steps: list[SequenceStep]) -> list[SequenceResult]:
            results.extend(done := step(steps))
            return done

        monkeypatch.setattr(executor, "step", recorded)
        assert some.seconds_a_step(2) > 0
        kept.close()
        rows_LN = np.mean([result.rows_L2[:, 1] for result in results if result.rows_L2 is not None], axis=0)
        assert len(results) == 4
        neurons = executor.neurons // len(rows_LN)
        assert some.shares(2)[0] == pytest.approx((rows_LN / neurons).tolist())
