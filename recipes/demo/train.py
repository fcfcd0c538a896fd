"""Train the bundled demo checkpoint: a ReLU-gated Llama of 3.2 M parameters on Python's own documentation.

    python recipes/demo/train.py [--tokens 20e6] [--out recipes/demo]

The text is `pi_compile.corpus.python_docs`. Needs the compile extra. The loss is cross-entropy plus an L1 penalty on
the gated activations (as in ProSparse, arXiv 2402.13516, section 3.2). Its weight is not a constant: a small controller
moves it so that the mean density follows a falling target, because nobody knows beforehand which weight gives which
density.
Two cores need about an hour. `model.safetensors` is written in float16; figures go to `training.json`.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from pi_compile.corpus.python_docs import documents, is_held_out

END = "<|end|>"
VOCABULARY, CONTEXT, BATCH = 2048, 512, 16
DENSITY_START, DENSITY_END = 0.35, 0.08
# Prose is what a reader recognises, so documentation is read more often than source.
WEIGHT = {"topic": 4, "doc": 3, "source": 1}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    end = tokenizer.token_to_id(END)
    return np.concatenate([np.array([*e.ids, end], np.int64) for e in tokenizer.encode_batch(texts)])


class Densities:
    """Collects, per layer, the share of non-zero gated activations and their mean size (the L1 term)."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.l1: list[torch.Tensor] = []
        self.density: list[float] = []
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(self._see)

    def _see(self, _module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        self.l1.append(args[0].float().abs().mean())
        self.density.append((args[0].detach() != 0).float().mean().item())

    def take(self) -> tuple[torch.Tensor, list[float]]:
        taken = torch.stack(self.l1).sum(), self.density
        self.l1, self.density = [], []
        return taken


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, seen: Densities, stream: np.ndarray) -> dict[str, object]:
    """Perplexity over non-overlapping windows of the context length, and density per layer."""
    windows = torch.from_numpy(stream[: len(stream) // CONTEXT * CONTEXT].reshape(-1, CONTEXT))
    losses, densities = [], []
    for x in windows.split(BATCH):
        losses.append(model(input_ids=x, labels=x).loss.item() * len(x))
        densities.append(np.array(seen.take()[1]) * len(x))
    total = len(windows)
    return {
        "tokens": int(windows.numel()),
        "perplexity": round(math.exp(sum(losses) / total), 3),
        "density": [round(float(d), 4) for d in np.sum(densities, axis=0) / total],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=float, default=20e6)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)

    named = list(documents())
    kept = [(n, t) for n, t in named if not is_held_out(n)]
    tokenizer = train_tokenizer([t for n, t in kept if not n.startswith("source")])
    parts = [(n.split("/")[0], s) for n, s in ((n, token_stream(tokenizer, [t])) for n, t in kept)]
    order = [i for i, (kind, _) in enumerate(parts) for _ in range(WEIGHT.get(kind, 4))]
    held_out = token_stream(tokenizer, [t for n, t in named if is_held_out(n) and not n.startswith("source")])

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=3, hidden_act="relu", max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    seen = Densities(model)
    steps = int(args.tokens / (BATCH * CONTEXT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * s / steps)))
    )
    penalty, stream, start = 1e-3, np.empty(0, np.int64), time.time()
    for step in range(steps):
        if len(stream) < BATCH * CONTEXT:
            stream = np.concatenate([stream, *(parts[i][1] for i in rng.permutation(order))])
        x = torch.from_numpy(stream[: BATCH * CONTEXT].reshape(BATCH, CONTEXT))
        stream = stream[BATCH * CONTEXT :]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        l1, density = seen.take()
        (loss + penalty * l1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        # Log-linear fall over the first 70 %, then constant while the learning rate decays.
        share = min(1.0, step / (0.7 * steps))
        target = DENSITY_START * (DENSITY_END / DENSITY_START) ** share
        penalty *= 1.03 if np.mean(density) > target else 1 / 1.03
        if step % 50 == 0:
            print(
                f"step {step}/{steps} loss {loss.item():.3f} density {np.mean(density):.3f} (target {target:.3f}) "
                f"penalty {penalty:.2e} {(step + 1) * BATCH * CONTEXT / (time.time() - start):.0f} tokens/s",
                flush=True,
            )

    half = model.half()
    half.save_pretrained(args.out)
    tokenizer.save(str(args.out / "tokenizer.json"))
    figures = {"trained_tokens": steps * BATCH * CONTEXT, "minutes": round((time.time() - start) / 60, 1)}
    figures["held_out"] = evaluate(half.float(), seen, held_out)
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
