"""Train a bundled demo checkpoint on Python's own documentation.

    python recipes/demo/train.py [--shape llama] [--tokens 20e6] [--out recipes/demo]
    python recipes/demo/train.py --shape nanochat --out recipes/demo/relu2

`llama` is a ReLU-gated Llama of 3.2 M parameters, trained by AdamW: two cores need about an hour. `nanochat` is a
nanochat of 3.4 M parameters (ReLU², no gate), whose matrices Muon trains: one core needs about 40 minutes.
`qwen3_moe` is a mixture of experts of 7.6 M parameters (SiLU, 2 of 8 experts), without a penalty: half an hour of one.

The text is `pi_compile.corpus.python_docs`. Needs the compile extra. The loss is cross-entropy plus an L1 penalty on
what comes out of the ReLU (as in ProSparse, arXiv 2402.13516, section 3.2). Its weight is not a constant: a small
controller moves it so that the mean density follows a falling target, because nobody knows beforehand which weight
gives which density. `model.safetensors` is written in float16; figures go to `training.json`. What is interrupted goes
on from `training.pt` in the same folder, which is written every hundred steps.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pi_compile.corpus.python_docs import documents, is_held_out

HERE = Path(__file__).parent
END = "<|end|>"
VOCABULARY, CONTEXT = 2048, 512
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


@dataclass(frozen=True)
class Shape:
    """A kind of model, and how it is trained."""

    tokens: float
    batch: int
    build: Callable[[], PreTrainedModel]
    penalised: Callable[[torch.nn.Module, Callable[[torch.Tensor], None]], object] | None
    """Hands the values of an FFN that fire where they are not zero; None where none are to become zero."""
    optimizers: Callable[[PreTrainedModel], list[torch.optim.Optimizer]]


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=192, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=3, hidden_act="relu", max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def _nanochat() -> PreTrainedModel:
    model = NanoChatForCausalLM(
        NanoChatConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )
    )  # fmt: skip
    for layer in model.model.layers:  # each layer begins as the identity, as in nanochat
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.fc2.weight)
    return model


def _qwen3_moe() -> PreTrainedModel:
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=256, moe_intermediate_size=256, num_hidden_layers=4, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
            num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, output_router_logits=True,
        )
    )  # fmt: skip
    model.config._experts_implementation = "eager"  # on a processor the quickest
    return model


def _adam(parameters: Iterable[torch.nn.Parameter], decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), weight_decay=decay)


def _muon(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    matrices = torch.optim.Muon(
        model.model.layers.parameters(), lr=0.012, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
    )
    return [matrices, _adam(model.model.embed_tokens.parameters(), 0.0)]


SHAPES = {
    "llama": Shape(
        tokens=20e6,
        batch=16,
        build=_llama,
        penalised=lambda ffn, see: ffn.down_proj.register_forward_pre_hook(lambda _, args: see(args[0])),
        optimizers=lambda model: [_adam(model.parameters(), 0.05)],
    ),
    # The square has no slope at zero, so the penalty takes what is squared.
    "nanochat": Shape(
        tokens=7e6,
        batch=8,
        build=_nanochat,
        penalised=lambda ffn, see: ffn.fc1.register_forward_hook(lambda _, _args, z: see(z.relu())),
        optimizers=_muon,
    ),
    "qwen3_moe": Shape(
        tokens=4e6,
        batch=8,
        build=_qwen3_moe,
        penalised=None,
        optimizers=lambda model: [_adam(model.parameters(), 0.05)],
    ),
}


class Densities:
    """Collects, per layer, the share of neurons that fire and the mean size of their values (the L1 term)."""

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self.l1: list[torch.Tensor] = []
        self.density: list[float] = []
        for layer in model.model.layers if shape.penalised else ():
            shape.penalised(layer.mlp, self._see)

    def _see(self, values: torch.Tensor) -> None:
        self.l1.append(values.float().abs().mean())
        self.density.append((values.detach() != 0).float().mean().item())

    def take(self) -> tuple[torch.Tensor, list[float]]:
        taken = torch.stack([torch.zeros(()), *self.l1]).sum(), self.density
        self.l1, self.density = [], []
        return taken


class Run:
    """A training under way, which another one can go on with."""

    def __init__(self, shape: Shape, steps: int) -> None:
        self.shape, self.steps, self.model = shape, steps, shape.build()
        self.seen, self.optimizers = Densities(self.model, shape), shape.optimizers(self.model)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                o, lambda s: min(1, (s + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * s / steps)))
            )
            for o in self.optimizers
        ]
        self.penalty, self.stream, self.step, self.seconds = 1e-3, np.empty(0, np.int64), 0, 0.0
        self.rng = np.random.default_rng(0)

    _NAMES = ("penalty", "stream", "step", "seconds", "rng")

    def save(self, path: Path) -> None:
        """Write all that later steps depend on."""
        parts = [part.state_dict() for part in (self.model, *self.optimizers, *self.schedules)]
        torch.save({"parts": parts, **{name: getattr(self, name) for name in self._NAMES}}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def resume(self, path: Path) -> None:
        """Take what was saved."""
        saved = torch.load(path, weights_only=False)
        for part, values in zip((self.model, *self.optimizers, *self.schedules), saved["parts"], strict=True):
            part.load_state_dict(values)
        for name in self._NAMES:
            setattr(self, name, saved[name])

    def one_step(self, parts: list[np.ndarray]) -> str:
        """Train on the next tokens of the documents, in random orders; returns a line of figures."""
        begin, size = time.time(), self.shape.batch * CONTEXT
        if len(self.stream) < size:
            self.stream = np.concatenate([self.stream, *(parts[i] for i in self.rng.permutation(len(parts)))])
        x, self.stream = torch.from_numpy(self.stream[:size].reshape(self.shape.batch, CONTEXT)), self.stream[size:]
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(input_ids=x, labels=x).loss
        l1, density = self.seen.take()
        (loss + self.penalty * l1).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        # Log-linear fall over the first 70 %, then constant while the learning rate decays.
        share = min(1.0, self.step / (0.7 * self.steps))
        target = DENSITY_START * (DENSITY_END / DENSITY_START) ** share
        mean = np.mean(density or [0.0])
        self.penalty *= 1.03 if mean > target else 1 / 1.03
        self.step += 1
        self.seconds += time.time() - begin
        rate = f"{self.step * size / self.seconds:.0f} tokens/s"
        return f"loss {loss.item():.3f} density {mean:.3f} (target {target:.3f}) penalty {self.penalty:.2e} {rate}"


@torch.no_grad()
def evaluate(model: PreTrainedModel, seen: Densities, stream: np.ndarray) -> dict[str, object]:
    """Perplexity over non-overlapping windows of the context length, and density per layer."""
    windows = torch.from_numpy(stream[: len(stream) // CONTEXT * CONTEXT].reshape(-1, CONTEXT))
    losses, densities = [], []
    for x in windows.split(16):
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
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    shape, saved = SHAPES[args.shape], args.out / "training.pt"
    torch.manual_seed(0)

    named = list(documents())
    kept = [(n, t) for n, t in named if not is_held_out(n)]
    if args.shape == "llama":
        tokenizer = train_tokenizer([t for n, t in kept if not n.startswith("source")])
    else:  # so that perplexities are of the same tokens
        tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    parts = [(n.split("/")[0], token_stream(tokenizer, [t])) for n, t in kept]
    repeated = [stream for kind, stream in parts for _ in range(WEIGHT.get(kind, 4))]
    held_out = token_stream(tokenizer, [t for n, t in named if is_held_out(n) and not n.startswith("source")])

    run = Run(shape, int((args.tokens or shape.tokens) / (shape.batch * CONTEXT)))
    args.out.mkdir(parents=True, exist_ok=True)
    if saved.exists():
        run.resume(saved)
    while run.step < run.steps:
        line = run.one_step(repeated)
        if run.step % 50 == 0:
            print(f"step {run.step}/{run.steps} {line}", flush=True)
        if run.step % 100 == 0:
            run.save(saved)

    half = run.model.half()
    half.save_pretrained(args.out)
    tokenizer.save(str(args.out / "tokenizer.json"))
    trained = {"trained_tokens": run.steps * shape.batch * CONTEXT, "minutes": round(run.seconds / 60, 1)}
    figures = {**trained, "held_out": evaluate(half.float(), run.seen, held_out)}
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    saved.unlink(missing_ok=True)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
