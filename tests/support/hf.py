"""Small random checkpoints as Hugging Face writes them, for tests."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

TEXT = ["Once upon a time there was a little neuron that did not fire.", "It waited, and waited; then it did!"] * 4
LLAMA = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 83,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "hidden_act": "relu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    "vocab_size": 307,
    "hidden_size": 36,
    "word_embed_proj_dim": 36,
    "ffn_dim": 83,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 61,
}


def random_llama(folder: Path, *, tokenizer: bool = True, **overrides: Any) -> LlamaForCausalLM:
    """Save a random Llama; `overrides` are config fields, or those of `save`. Returns the model."""
    config, saving = _split(LLAMA, overrides)
    model = LlamaForCausalLM(LlamaConfig(**config))
    save(randomised(model), folder, **saving)
    if tokenizer:
        write_tokenizer(folder)
    return model


def random_opt(folder: Path, *, tokenizer: bool = True, **overrides: Any) -> OPTForCausalLM:
    """Save a random OPT with the vocab.json and merges.txt of its published models."""
    config, saving = _split(OPT, overrides)
    model = OPTForCausalLM(OPTConfig(**config))
    save(randomised(model), folder, **saving)
    if tokenizer:
        write_opt_tokenizer(folder)
    return model


def randomised(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Every parameter random, norms and biases included, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            # What a convolution makes smaller a norm behind it makes larger again, with its error.
            spread = 1.0 if "conv1d" in name else 0.2
            parameter.normal_(1.0 if of_norm else 0.0, spread, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2, generator=generator)
    return model.eval()


def save(
    model: PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
    pickled: bool = False,
) -> None:
    """`save_pretrained` in a number format; `pickled` writes pytorch_model.bin as older versions did."""
    # Not `model.to`, which would round the rotary frequencies too: they are no part of a checkpoint.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(folder, max_shard_size=shard)
    if pickled:
        _to_pickles(model, folder)


def edit_json(path: Path, *remove: str, **changes: Any) -> None:
    """Set and remove keys of a JSON object."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if k not in remove}))


def edit_tensors(folder: Path, *remove: str, **changes: torch.Tensor) -> None:
    """Set and remove tensors of a model.safetensors; keys of `changes` have `__` for a dot."""
    from safetensors.torch import load_file

    tensors = {**load_file(folder / "model.safetensors"), **{k.replace("__", "."): v for k, v in changes.items()}}
    kept = {k: v.clone() for k, v in tensors.items() if k not in remove}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, *, vocab_size: int = 120) -> None:
    """A tokenizer.json that puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106 (no password)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def write_opt_tokenizer(folder: Path) -> None:
    """Byte-level vocab.json and merges.txt; </s> (id 2) begins and ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.model.save(str(folder))
    names = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    fields = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_prefix_space": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def _split(defaults: dict[str, Any], overrides: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    saving = {key: overrides.pop(key) for key in ("dtype", "shard", "pickled") if key in overrides}
    return {**defaults, **overrides}, saving


def _to_pickles(model: PreTrainedModel, folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    state = model.state_dict()
    if len(shards) == 1:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = {
            shard: shard.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
            for shard in set(index["weight_map"].values())
        }
        for shard, name in names.items():
            torch.save({k: state[k] for k, s in index["weight_map"].items() if s == shard}, folder / name)
        index["weight_map"] = {k: names[s] for k, s in index["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        (folder / "model.safetensors.index.json").unlink()
    for shard in shards:
        shard.unlink()
