"""Train a small dense model on Python's documentation, then make it sparse: about three minutes on two cores.

python docs/examples/sparsify.py FOLDER
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pi_compile.cli.rendering import sparsify_text
from pi_compile.cli.sparsifying import training_bar
from pi_compile.sparsification.data import open_mixture
from pi_compile.sparsification.model import open_base, packing_of
from pi_compile.sparsification.recipe import SparsifyRecipe, default_sparsify_recipe
from pi_compile.sparsification.run import sparsify

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def recipe(steps: int) -> SparsifyRecipe:
    """ReLU above a threshold in place of SiLU, which is set so that 85 % of the neurons are 0 at the end."""
    data = default_sparsify_recipe("dense").model_dump()
    data["stages"] = [{"steps": steps, "penalty": 0.0, "curve": "constant"}]
    data["train"] |= {
        "window": 128,
        "micro_batch": 16,
        "learning_rate": 1e-3,
        "distillation": 0.0,
        "warmup_steps": steps // 10,
    }
    data["corpus"] |= {"tune_tokens": 8_192, "report_tokens": 16_384}
    data["run"] |= {"every": max(1, steps // 5)}
    return SparsifyRecipe.model_validate(data)


def train_dense(folder: Path, plan: SparsifyRecipe, steps: int) -> None:
    """A Llama with SwiGLU and the demo's tokenizer, trained from nothing."""
    config = LlamaConfig(vocab_size=2048, max_position_embeddings=512, tie_word_embeddings=True, **SHAPE)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "dense")
    shutil.copyfile(DEMO / "tokenizer.json", folder / "dense" / "tokenizer.json")
    packing = packing_of(open_base(plan.model, folder), plan.train.window)
    text = open_mixture(plan.corpus, folder, packing, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        ids = torch.from_numpy(text.take(plan.train.batch))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder / "dense")


def main(folder: Path, dense_steps: int = 600, steps: int = 300) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plan = recipe(steps)
    train_dense(folder, plan, dense_steps)
    (folder / "SPARSIFY.toml").write_text(plan.to_toml())
    with training_bar() as watch:
        record = sparsify(folder / "SPARSIFY.toml", folder / "sparse", watch=watch)
    print(sparsify_text(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
