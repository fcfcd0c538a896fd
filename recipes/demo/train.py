"""Train a bundled demo checkpoint on Python's own documentation.

    python recipes/demo/train.py [--shape llama] [--tokens 20e6] [--out recipes/demo]
    python recipes/demo/train.py --shape nanochat --teacher recipes/demo --out recipes/relu2 [--compile]

`llama` is a ReLU-gated Llama of 3.2 M parameters, trained by AdamW: two cores need about an hour. `nanochat` is a
nanochat of 3.4 M parameters (ReLU², no gate), whose matrices Muon trains: one core needs 40 minutes with `--compile`.
`qwen3_moe` is a mixture of experts of 7.6 M parameters (SiLU, 2 of 8 experts), without a penalty: 15 minutes of one.

The text is `pi_compile.corpus.python_docs`. Needs the compile extra. The loss is cross-entropy plus an L1 penalty on
what comes out of the ReLU (as in ProSparse, arXiv 2402.13516, section 3.2). Its weight is not a constant: a small
controller moves it so that the mean density follows a falling target, because nobody knows beforehand which weight
gives which density. With a teacher the model learns that one's probabilities first, and more and more of the text alone
(as in BAM, arXiv 1907.04829), so that it can come to know more. `model.safetensors` is written in float16;
figures go to `training.json`. What is interrupted goes on from `training.pt` in the same folder, which is written
every hundred steps.
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
    AutoModelForCausalLM,
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
DENSITY_START = 0.35
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
    prose: int = 2
    """How many times as often as by `WEIGHT` documentation is read."""
    density: float = 1.0
    """Of neurons that fire, at the end."""


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


class Muon(torch.optim.Optimizer):
    """Moves a matrix by its momentum made orthogonal, so that no direction is learnt faster than another.

    torch has it for single matrices; experts are stacks of them.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.012, "decay": 0.05, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - momentum)
                rms = 0.2 * math.sqrt(max(p.shape[-2:]))  # as large as a step of Adam
                p.mul_(1 - lr * group["decay"]).sub_(orthogonal(p.grad.lerp(mean, momentum)), alpha=lr * rms)


def orthogonal(m: torch.Tensor) -> torch.Tensor:
    """Nearly U Vᵀ of each matrix U S Vᵀ, by five steps whose factors are Keller Jordan's."""
    tall = m.shape[-2] > m.shape[-1]
    x = (m.mT if tall else m).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.mT if tall else x


def _muon(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    inner = list(model.model.layers.parameters())
    vectors = [p for p in inner if p.ndim == 1] + [*model.model.norm.parameters(), model.model.embed_tokens.weight]
    return [Muon(p for p in inner if p.ndim > 1), _adam(vectors, 0.0)]


SHAPES = {
    "llama": Shape(
        tokens=20e6,
        batch=16,
        build=_llama,
        penalised=lambda ffn, see: ffn.down_proj.register_forward_pre_hook(lambda _, args: see(args[0])),
        optimizers=lambda model: [_adam(model.parameters(), 0.05)],
        prose=1,
        density=0.08,
    ),
    # The square has no slope at zero, so the penalty takes what is squared.
    "nanochat": Shape(
        tokens=7.4e6,
        batch=8,
        build=_nanochat,
        penalised=lambda ffn, see: ffn.fc1.register_forward_hook(lambda _, _args, z: see(z.relu())),
        optimizers=_muon,
        density=0.1,
    ),
    "qwen3_moe": Shape(tokens=1.4e6, batch=4, build=_qwen3_moe, penalised=None, optimizers=_muon),
}


class Densities:
    """Collects, per layer, the share of neurons that fire and the mean size of their values (the L1 term)."""

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self.l1: list[torch.Tensor] = []
        self.density: list[torch.Tensor] = []
        for layer in model.model.layers if shape.penalised else ():
            shape.penalised(layer.mlp, self._see)

    def _see(self, values: torch.Tensor) -> None:
        self.l1.append(values.abs().mean(dtype=torch.float32))
        self.density.append(values.detach().sign().abs().mean(dtype=torch.float32))

    def take(self) -> tuple[torch.Tensor, list[float]]:
        taken = torch.stack([torch.zeros(()), *self.l1]).sum(), [d.item() for d in self.density]
        self.l1, self.density = [], []
        return taken


def pace(step: int, steps: int) -> float:
    """What the learning rates are multiplied by: a short rise, then half a cosine down to a twentieth."""
    return min(1, (step + 1) / min(100, steps / 20)) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


class Run:
    """A training under way, which another one can go on with."""

    def __init__(self, shape: Shape, steps: int, teacher: PreTrainedModel | None = None) -> None:
        self.shape, self.steps, self.model, self.teacher = shape, steps, shape.build(), teacher
        for model in filter(None, (self.model, teacher)):
            model.set_attn_implementation("eager")  # on a processor the quickest, of texts so short
        self.seen, self.optimizers = Densities(self.model, shape), shape.optimizers(self.model)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: pace(s, steps)) for o in self.optimizers]
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

    def losses(self, x: torch.Tensor, taught: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The text's cross-entropy, and what is learnt: for the part `taught` the teacher's probabilities instead."""
        with torch.autocast("cpu", torch.bfloat16):
            found = self.model(input_ids=x)
            logs = found.logits[:, :-1].float().log_softmax(-1)
            text = -logs.gather(-1, x[:, 1:, None]).mean()
            balance = 1e-3 * found.get("aux_loss", 0.0)  # of a mixture's experts
            if self.teacher is None:
                return text, text + balance
            with torch.no_grad():
                told = self.teacher(input_ids=x).logits[:, :-1].float().softmax(-1)
        return text, (1 - taught) * text - taught * (told * logs).sum(-1).mean() + balance

    def one_step(self, parts: list[np.ndarray]) -> str:
        """Train on the next tokens of the documents, in random orders; returns a line of figures."""
        begin, size = time.time(), self.shape.batch * CONTEXT
        if len(self.stream) < size:
            self.stream = np.concatenate([self.stream, *(parts[i] for i in self.rng.permutation(len(parts)))])
        x, self.stream = torch.from_numpy(self.stream[:size].reshape(self.shape.batch, CONTEXT)), self.stream[size:]
        share = self.step / self.steps
        loss, aside = self.losses(x, 1 - share)
        l1, density = self.seen.take()
        (aside + self.penalty * l1).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        # Log-linear fall between a fifth and four fifths of the way: first it learns, last it settles.
        target = DENSITY_START * (self.shape.density / DENSITY_START) ** min(1.0, max(0.0, share - 0.2) / 0.6)
        mean = np.mean(density or [target])
        if share > 0.2:
            self.penalty *= (mean / target) ** 0.05
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
    parser.add_argument(
        "--teacher", type=Path, help="a checkpoint of the same vocabulary, whose guesses are learnt too"
    )
    parser.add_argument(
        "--compile", action="store_true", help="by torch.compile: a quarter faster, with a C++ compiler"
    )
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
    repeated = [
        stream for kind, stream in parts for _ in range(1 if kind == "source" else shape.prose * WEIGHT.get(kind, 4))
    ]
    held_out = token_stream(tokenizer, [t for n, t in named if is_held_out(n) and not n.startswith("source")])

    teacher = args.teacher and AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.bfloat16)
    run = Run(shape, int((args.tokens or shape.tokens) / (shape.batch * CONTEXT)), teacher)
    args.out.mkdir(parents=True, exist_ok=True)
    if saved.exists():
        run.resume(saved)
    if args.compile:
        run.losses = torch.compile(run.losses)  # type: ignore[method-assign]
    while run.step < run.steps:
        line = run.one_step(repeated)
        if run.step % 50 == 0:
            print(f"step {run.step}/{run.steps} {line}", flush=True)
        if run.step % 100 == 0:
            run.save(saved)

    half = run.model.half()
    half.save_pretrained(args.out)
    tokenizer.save(str(args.out / "tokenizer.json"))
    made = {"shape": args.shape, "teacher": args.teacher and args.teacher.name, "torch": torch.__version__}
    trained = {**made, "trained_tokens": run.steps * shape.batch * CONTEXT, "minutes": round(run.seconds / 60, 1)}
    figures = {**trained, "held_out": evaluate(half.float(), run.seen, held_out)}
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    saved.unlink(missing_ok=True)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
