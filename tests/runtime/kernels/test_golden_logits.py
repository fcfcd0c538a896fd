"""The golden logits are near what the definition says; that every instruction set computes them is in `test_isa.py`."""

from pathlib import Path

import numpy as np
import pytest
from support.golden_logits import FORMATS, MODES, PROMPT, TOKENS, WHOLE_FORMATS, decoders, key
from support.paths import GOLDEN_LOGITS
from support.synthetic import counted_artifact

from pi_runtime.artifact.reader import Artifact
from pi_runtime.kernels import SUMS, reference


@pytest.mark.parametrize(("fmt", "lanes"), [("f16", 8), ("f16", 16), *((name, 8) for name in FORMATS[1:])])
def test_golden_logits_are_near_the_definition(fmt: str, lanes: int, tmp_path: Path) -> None:
    """In block formats an input at the edge rounds to another byte, and by that a predictor may name another neuron."""
    golden, errors = np.load(GOLDEN_LOGITS)[key(fmt, lanes)], []
    for name, decoder in decoders(fmt).items():
        path = counted_artifact(tmp_path / f"{name}.pi", decoder, fmt)
        with Artifact.open(path) as artifact:
            for mode in MODES[: 1 if fmt in WHOLE_FORMATS else 2]:
                wanted_TV = reference.forward(artifact, [*PROMPT, *TOKENS], mode)[len(PROMPT) - 1 :]
                found_TV = golden[len(errors) : len(errors) + len(wanted_TV)]
                errors += (np.abs(found_TV - wanted_TV).max(-1) / np.abs(wanted_TV).max(-1)).tolist()
    assert len(errors) == len(golden)
    least, median, most = (1e-4, 1e-4, 1e-4) if fmt == "f16" else (1e-4, 0.01, 0.1)
    if fmt in WHOLE_FORMATS:
        least = median = 0.02
    if fmt in ("q4_1", "q4z", "q5_1"):  # no text here without such an input: those without any are in `test_forward.py`
        least, median, most = 0.01, 0.02, 0.2
    assert min(errors) < least
    assert np.median(errors) < median
    assert max(errors) < most


def test_the_version_of_the_sums_stands_beside_them() -> None:
    """Stored keys and values are found by it."""
    assert np.load(GOLDEN_LOGITS)["sums"] == SUMS
