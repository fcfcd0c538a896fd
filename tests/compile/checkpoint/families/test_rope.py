"""Rotary angles are those of transformers, from every form of config; angles that depend on the text are refused."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig, NemotronConfig, PhiConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.nemotron.modeling_nemotron import NemotronRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from pi_compile.checkpoint.config import Config
from pi_compile.checkpoint.families.rope import rotary
from pi_compile.errors import CheckpointError

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {
    "rope_type": "longrope",
    "short_factor": np.linspace(1, 3, 64).tolist(),
    "long_factor": np.linspace(2, 40, 64).tolist(),
    "original_max_position_embeddings": 4096,
}
FIELDS: dict[str, dict[str, Any]] = {
    "longrope": {"rope_parameters": LONG},
    "longrope-factor": {"rope_scaling": LONG | {"factor": 3.0}},
    "longrope-attention": {"rope_scaling": LONG | {"attention_factor": 1.25}},
    "none": {},
    "beside": {"rope_theta": 777.0},
    "beside-null": {"rope_theta": 777, "rope_scaling": None},
    "inside-first": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 777.0},
    "older-first": {"rope_scaling": {"type": "default", "rope_theta": 6.0}, "rope_parameters": {"rope_theta": 5.0}},
    "whole-heads": {"rope_parameters": {"partial_rotary_factor": 1.0}, "rope_theta": 8.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 10000.0},
    "llama3": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 5e5}},
    "llama3-older": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "rope_theta": 5e5},
    "llama3-beside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 300, "rope_theta": 5e5},
    "llama3-whole": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "yarn": {"rope_parameters": YARN},
    "yarn-large": {"rope_scaling": YARN | {"factor": 40.0}, "rope_theta": 1e6},
    "yarn-betas": {"rope_parameters": YARN | {"beta_fast": 16, "beta_slow": 2.5}},
    "yarn-exact": {"rope_parameters": YARN | {"truncate": False}},
    "yarn-factor": {"rope_parameters": YARN | {"attention_factor": 1.25}},
    "yarn-mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn-attn-factor": {"rope_scaling": YARN | {"attn_factor": 0.8782488562869419}},
    "default-older": {"rope_scaling": {"type": "default"}, "rope_parameters": LLAMA3, "rope_theta": 5e5},
    "default-with-others": {"rope_scaling": {"type": "default", "factor": 4.0, "attention_factor": 0.5}},
    "default-beside-another": {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 4.0}},
    "linear-with-others": {"rope_scaling": {"type": "linear", "factor": 4.0, "attention_factor": 0.5, "beta_fast": 3}},
    "yarn-shrunk": {"rope_parameters": YARN | {"factor": 1.0}},
}


def ours(fields: dict[str, Any], head_dim: int = 128, partial: float | None = None) -> tuple[np.ndarray, float]:
    whole = {"max_position_embeddings": 16384, **fields}
    found = rotary(Config(Path("config.json"), whole), head_dim, partial=partial)
    assert found["positions"] == "rope"
    return np.array(found["rotary_frequencies"]), found["rotary_scale"]


def check(found: tuple[np.ndarray, float], theirs: Any) -> None:
    """Equal float32 numbers up to the last bit: the powers of float32 are not the same everywhere."""
    frequencies, scale = found
    np.testing.assert_array_equal(frequencies, frequencies.astype(np.float32))
    np.testing.assert_allclose(frequencies, theirs.inv_freq.double().numpy(), rtol=4e-7)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("case", FIELDS)
def test_angles_are_those_of_transformers(case: str) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "head_dim": 128, "max_position_embeddings": 16384}
    check(ours(FIELDS[case]), LlamaRotaryEmbedding(LlamaConfig(**sizes, **deepcopy(FIELDS[case]))))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.4},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.5},
        {"rope_parameters": YARN, "partial_rotary_factor": 0.5},
    ],
)
def test_partly_rotated_heads(fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 160, "num_attention_heads": 2, "max_position_embeddings": 16384}
    check(ours(fields, 80, 0.5), NemotronRotaryEmbedding(NemotronConfig(**sizes, **deepcopy(fields))))
    check(ours(fields, 80, 0.5), PhiRotaryEmbedding(PhiConfig(**sizes, **deepcopy(fields))))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "angles that do not depend on how long the text"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_parameters: short_factor\n"),
    "longrope-short": ({"rope_scaling": LONG | {"short_factor": [1.0] * 63}}, "rope_scaling: short_factor\n"),
    "longrope-zero": ({"rope_scaling": LONG | {"short_factor": [1.0] * 63 + [0]}}, "rope_scaling: short_factor\n"),
    "longrope-beside": ({"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
    "unknown": ({"rope_scaling": {"type": "spiral"}}, "expected: one of default, proportional, linear, llama3, yarn"),
    "no-name": ({"rope_scaling": {"type": 3}}, "expected: one of default, proportional, linear, llama3, yarn"),
    "no-object": ({"rope_scaling": "linear"}, "config.json: rope_scaling"),
    "unknown-key": ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
    "no-factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor"),
    "no-low": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling: low_freq_factor"),
    "low-high": ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "more than low_freq_factor = 1.0"),
    "text": ({"rope_scaling": YARN | {"beta_fast": "32"}}, "rope_scaling: beta_fast"),
    "truncate": ({"rope_scaling": YARN | {"truncate": 1}}, "expected: true or false"),
    "theta": ({"rope_theta": -1.0}, "config.json: rope_theta"),
    "theta-small": ({"rope_theta": 1e-44}, "angles that float32 can hold"),
    "theta-large": ({"rope_theta": 1e300}, "angles that float32 can hold"),
    "theta-huge": ({"rope_theta": 10**400}, "a positive number"),
    "factor-large": ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "angles that float32 can hold"),
    "theta-1": ({"rope_scaling": YARN, "rope_theta": 1.0}, "another number than 1"),
    "partial": ({"partial_rotary_factor": 0.5}, "this family rotates whole heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case: str) -> None:
    fields, message = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        ours(fields)
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(("head_dim", "partial"), [(9, None), (20, 0.25), (80, 0.001)])
def test_an_odd_width_cannot_be_rotated(head_dim: int, partial: float | None) -> None:
    with pytest.raises(CheckpointError, match="an even number of rotated columns"):
        ours({} if partial is None else {"partial_rotary_factor": partial}, head_dim, partial)


def test_heads_that_no_model_has_are_refused_before_they_are_computed_with() -> None:
    with pytest.raises(CheckpointError, match="65536 at most"):
        ours({}, head_dim=1 << 40)
