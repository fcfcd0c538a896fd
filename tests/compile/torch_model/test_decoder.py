"""The decoder of profiling and training: weights and windows. checkpoint/families/test_logits.py tests its function."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from support import hf

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CorpusError
from pi_compile.torch_model import decoder as td


def test_weights_have_the_names_of_the_artifact(tmp_path: Path) -> None:
    hf.random_llama(tmp_path, tokenizer=False, mlp_bias=True)
    checkpoint = open_checkpoint(tmp_path)
    layers = {f"layers/{n}/{name}" for n in range(3) for name in td.layer_weights(checkpoint, n, "cpu")}
    assert layers | td.global_weights(checkpoint, "cpu").keys() == checkpoint.array_shapes.keys()


def test_windows_are_consecutive_and_the_rest_is_dropped() -> None:
    assert td.windows(np.arange(11, dtype=np.int32), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"the text has 3 tokens\n  expected: at least one window of 4"):
        td.windows(np.arange(3), 4)
