"""The dense model that the arms begin from: trained on the benchmark's text until it has little more to learn."""

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from pi_compile.corpus import documents
from pi_compile.sparsification.checkpoints import Checkpoints
from pi_compile.sparsification.data import open_mixture, read_evaluation_text
from pi_compile.sparsification.model import load_model, open_base, packing_of
from pi_compile.sparsification.recipe import SparsifyRecipe, default_sparsify_recipe
from pi_compile.sparsification.training import Training, Watch

END, WORDS = "<|end|>", 1024
SHAPE = {
    "vocab_size": WORDS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": 128,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
WINDOW, BATCH = 128, 16


def recipe_of(model: str, text: list[str], steps: int, **train: Any) -> SparsifyRecipe:
    """A recipe of the benchmark: `steps` steps of 2,048 tokens."""
    data = default_sparsify_recipe(model, activation="relu", corpus=text).model_dump()
    data["stages"] = [{"steps": steps, "penalty": 0.0, "curve": "constant"}]
    data["train"] |= {"window": WINDOW, "batch": BATCH, "micro_batch": BATCH, "warmup_steps": min(100, steps // 10)}
    data["train"] |= {"dtype": "bf16", **train}
    data["corpus"] |= {"tune_tokens": 16_384, "report_tokens": 65_536}
    data["run"] |= {"every": max(1, min(250, steps // 4))}
    return SparsifyRecipe.model_validate(data)


def trained_base(folder: Path, text: list[str], start: Path, rate: float, steps: int, watch: Watch) -> Path:
    """Train the model in the folder `start` for `steps` steps, or go on with it; return the base's folder."""
    base, work = folder / "base", folder / "base.work"
    if base.exists():
        return base
    recipe = recipe_of(str(start.resolve()), text, steps, learning_rate=rate, final_learning_rate=rate / 100)
    checkpoint = open_base(recipe.model, folder)
    packing = packing_of(checkpoint, WINDOW)
    training = Training(
        recipe,
        accelerator := Accelerator(cpu=True),
        load_model(checkpoint),
        None,
        open_mixture(recipe.corpus, folder, packing, seed=1000),
        read_evaluation_text(recipe.corpus, folder, packing),
        Checkpoints(work / "checkpoints", accelerator),
        watch=watch,
    )
    training.run()
    model = accelerator.unwrap_model(training.model)
    model.config.use_cache = True
    model.save_pretrained(work / "out")
    for file in start.glob("tokenizer*.json"):
        shutil.copyfile(file, work / "out" / file.name)
    accelerator.free_memory()
    return (work / "out").rename(base)


def random_model(folder: Path, text: list[str]) -> Path:
    """A random model with a tokenizer learned from the text, made unless it is there."""
    hidden = folder.with_name(f".{folder.name}")
    if folder.exists():
        return folder
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents(text, folder, "text"), trainer)
    tokenizer.save(str(hidden / "tokenizer.json"))
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(hidden)
    return hidden.rename(folder)
