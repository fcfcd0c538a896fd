"""The decoder that profiling and training use computes what transformers computes."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf
import numpy as np
import torch

from pi_compile import torch_decoder as td
from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CorpusError

CASES = {
    "llama-relu": (hf.random_llama, {}),
    "llama-silu": (hf.random_llama, {"hidden_act": "silu"}),
    "llama-biases": (hf.random_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": (hf.random_llama, {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "llama-theta": (hf.random_llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "opt": (hf.random_opt, {}),
    "opt-biasless": (hf.random_opt, {"enable_bias": False}),
}


@pytest.mark.parametrize(("save", "changes"), CASES.values(), ids=CASES)
def test_hidden_states_and_logits_are_those_of_transformers(save: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, tokenizer=False, **changes)
    checkpoint = open_checkpoint(tmp_path)
    d = checkpoint.decoder
    ids = torch.randint(0, d.vocab_size, (3, 29), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(ids, output_hidden_states=True)
        ends = td.end_weights(checkpoint, "cpu")
        x = td.embed(d, ends, ids)
        # The last of transformers' hidden states is normed: the logits stand for it.
        for n in range(d.n_layers):
            torch.testing.assert_close(x, wanted.hidden_states[n], rtol=1e-4, atol=1e-4)
            w = td.layer_weights(checkpoint, n, "cpu")
            x = td.attention(d, w, x)
            x = x + td.ffn_output(w, td.neurons(d, w, td.norm(d, w, "ffn/norm", x)))
        torch.testing.assert_close(td.logits(d, ends, x), wanted.logits, rtol=1e-4, atol=1e-4)


def test_weights_have_the_names_of_the_artifact(tmp_path: Path) -> None:
    hf.random_llama(tmp_path, tokenizer=False, mlp_bias=True)
    checkpoint = open_checkpoint(tmp_path)
    layers = {f"layers/{n}/{name}" for n in range(3) for name in td.layer_weights(checkpoint, n, "cpu")}
    assert layers | td.end_weights(checkpoint, "cpu").keys() == checkpoint.array_shapes.keys()


def test_windows_are_consecutive_and_the_rest_is_dropped() -> None:
    assert td.windows(np.arange(11, dtype=np.int32), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_text_shorter_than_one_window_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"the text has 3 tokens\n  expected: at least one window of 4"):
        td.windows(np.arange(3), 4)
