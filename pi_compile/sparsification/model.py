"""The model of a recipe as transformers runs it, made ready to be trained.

Llama, Mistral, Qwen2, Qwen3 and Mixtral: their FFNs are gated, and bear another activation in the same place.
"""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.checkpoint.config import read_json
from pi_compile.checkpoint.folder import ADAPTER_FILE
from pi_compile.checkpoint.tokenizer_files import TOKENIZER
from pi_compile.errors import CheckpointError
from pi_compile.evaluation.reference import stock_model
from pi_compile.recipe import ModelSection
from pi_compile.sparsification.data import Packing
from pi_compile.sparsification.recipe import FAMILIES


def open_base(section: ModelSection, folder: Path) -> Checkpoint:
    """Open the checkpoint of a recipe. Raises what `open_checkpoint` and `check_base` do."""
    path = folder / section.path
    model = path if path.exists() else section.path
    checkpoint = open_checkpoint(model, section.revision or None, section.ignore_config, in_recipe=True)
    check_base(checkpoint)
    return checkpoint


def check_base(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, once its FFNs can take another activation.

    Raises CheckpointError for a family that is not among `FAMILIES`, for quantised checkpoints and for adapters.
    """
    if (checkpoint.folder / ADAPTER_FILE).exists():
        raise CheckpointError(
            f"{checkpoint.folder}: has an adapter (PEFT)",
            expected="a whole model: with another activation all weights change, more than an adapter can",
            remedy="merge the adapter into its base model, and name that",
        )
    if not checkpoint.location.is_dir() or checkpoint.source.block_types:
        what = "a quantised checkpoint" if checkpoint.location.is_dir() else "a GGUF file"
        raise CheckpointError(
            f"{checkpoint.location}: {what} cannot be trained",
            expected="a folder as transformers writes it",
            remedy="name the checkpoint that it was made from",
        )
    if checkpoint.family not in FAMILIES:
        raise CheckpointError(
            f"{checkpoint.folder}: a {checkpoint.family} model cannot be made sparse",
            expected=f"one of {', '.join(FAMILIES)}",
            remedy="use a model of these families",
        )
    return checkpoint


def load_model(checkpoint: Checkpoint) -> Any:
    """The model in float32. Raises CheckpointError if transformers cannot load it."""
    model = stock_model(checkpoint.folder, str(checkpoint.folder))
    # The stock forward pass of experts, whatever is quicker: the same sums everywhere.
    model.config._experts_implementation = "eager"
    return model


def add_constants(model: Any) -> None:
    """Give each FFN a constant vector that is trained: the bias of its down projection, in a family that has one.

    Raises CheckpointError for a family without, and for a model that has one already.
    """
    config = model.config
    if config.model_type != "llama" or config.mlp_bias:
        has = "has biases in its FFNs, which are trained anyway" if getattr(config, "mlp_bias", False) else "has none"
        raise CheckpointError(
            f"target.constant: a {config.model_type} model {has}",
            expected="a Llama without mlp_bias, whose FFN can be given a bias",
            remedy="set target.constant = false",
        )
    config.mlp_bias = True
    for module in model.modules():
        if hasattr(module, "gate_proj"):
            for name in ("gate_proj", "up_proj", "down_proj"):
                layer = getattr(module, name)
                # The config has one switch for all three: two stay 0.
                layer.bias = nn.Parameter(torch.zeros(layer.out_features), requires_grad=name == "down_proj")


def packing_of(checkpoint: Checkpoint, window: int) -> Packing:
    """How the text of a recipe becomes sequences. Raises CheckpointError for a window beyond the model's context."""
    d = checkpoint.decoder
    if window > d.context_length:
        raise CheckpointError(
            f"[train] window = {window}",
            expected=f"at most {d.context_length}, the model's context",
            remedy="lower it",
        )
    files = checkpoint.text_files.files
    end: Any = read_json(checkpoint.folder / "config.json").get("eos_token_id")
    end_id: int | None = end[0] if isinstance(end, list) and end else end
    return Packing(tokenizers.Tokenizer.from_str(files[TOKENIZER].decode()), end_id, window)
