"""A small Llama with planted sparsity, and training on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pi_compile.calibration.profiling import ProfileSpec, profile
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.results.predictor_set import PredictorSet
from pi_compile.training import Texts, TrainSpec, train_predictors
from pi_compile.workers import work_folder
from support import hf

D_MODEL, D_FF, LAYERS, RANK = 128, 192, 3, 32
SHAPE = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SPEC = TrainSpec(window=32, batch=128, steps=12, rungs=("dense", "gate", "predicted"))
DENSE_LAYER = 1
"""Its neurons fire for most tokens, and no low-rank predictor can tell which."""


def text(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 130, tokens)


TEXTS = Texts(fit=text(0, 1500), tune=text(1, 400), report=text(2, 400))


def plant(folder: Path) -> None:
    """Layers whose neurons fire rarely, by a function of few directions of the input; one in which they fire often."""
    generator = torch.Generator().manual_seed(7)
    # A head whose logits differ by about one, as those of a model that predicts something.
    changes = {"lm_head__weight": 0.05 * torch.randn(131, D_MODEL, generator=generator)}
    for n in range(LAYERS):
        mlp = f"model__layers__{n}__mlp__"
        if n == DENSE_LAYER:
            changes[f"{mlp}gate_proj__bias"] = torch.full((D_FF,), 2.0)
            continue
        a, b = torch.randn(D_FF, 4, generator=generator), torch.randn(4, D_MODEL, generator=generator)
        changes[f"{mlp}gate_proj__weight"] = a @ b * 0.1
        changes[f"{mlp}gate_proj__bias"] = torch.full((D_FF,), -5.0)
    hf.edit_tensors(folder, **changes)


def planted(folder: Path, scratch: Path) -> tuple[Checkpoint, ActivationProfile]:
    """The checkpoint in `folder`, and its profile."""
    hf.random_llama(folder, tokenizer=False, mlp_bias=True, **SHAPE)
    plant(folder)
    return profiled(open_checkpoint(folder), scratch)


def profiled(checkpoint: Checkpoint, scratch: Path) -> tuple[Checkpoint, ActivationProfile]:
    spec = ProfileSpec(window=32, batch=8)
    with work_folder(scratch) as work:
        return checkpoint, profile(checkpoint, TEXTS.fit, spec, work=work, inputs="", progress=lambda *_: None)


def trained_on(
    model: Any, scratch: Path, *, texts: Texts = TEXTS, progress: Any = None, **changes: Any
) -> PredictorSet:
    progress = progress or (lambda *_: None)
    with work_folder(scratch) as work:
        return train_predictors(*model, texts, replace(SPEC, **changes), work=work, inputs="key", progress=progress)
