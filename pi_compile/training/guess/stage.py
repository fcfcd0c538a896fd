"""Guess: train a head that drafts tokens, on the model's own answers to text.

Three kinds of tasks, which any number of workers share: an artifact of the model, answers with their states, and the
training, which is one task. The last tenth of the answers is to text of the tune stream, so of other documents; the
head's figures are measured on it.

Shape letters: N answers, B of a batch, T tokens of each, C·D states side by side, S tokens of the short list.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pi_compile.checkpoint import Checkpoint
from pi_compile.files import read_arrays
from pi_compile.results import GuessWeights
from pi_compile.torch_model import PROCESS_BYTES, Estimate, computing_with, flops_per_s, layer_parameters
from pi_compile.torch_model import decoder as td
from pi_compile.training.guess.answers import ANSWERS, draw_answers
from pi_compile.training.guess.network import Tensor, Unrolled, first_weights, shifted
from pi_compile.training.guess.spec import GuessSpec, new_head
from pi_compile.workers import WorkFolder
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import PREFIX, GuessHead
from pi_runtime.artifact.sizes import PARTS, array_specs

Tokens = npt.NDArray[np.integer]
Progress = Callable[[int, int], None]

MODEL, HEAD = "model.pi", "head.npz"
HELD_OUT = 10
"""One answer in so many is held out."""
LATER = 0.8
"""Weight of each further token that is drafted, beside the one before."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


def announce(d: Decoder, spec: GuessSpec, workers: int) -> Iterator[str]:
    """A line for each part, with the time that it takes by short measurements."""
    head = new_head(d, spec)
    products = flops_per_s(256, d.d_model, min(d.d_ff, 4096), "cpu") * spec.threads**0.7
    model = d.n_layers * layer_parameters(d, d.experts_per_token) + d.vocab_size * d.d_model
    own = sum(int(np.prod(s.shape)) for _, s in head.arrays(d))
    states = 2 * spec.tokens * len(head.states) * d.d_model
    # A step of a few sequences is bound by memory, and takes about four times as long as its products.
    answers = Estimate(8 * spec.tokens * model / products, states, PROCESS_BYTES + 4 * model)
    yield answers.announced("drawing answers", spec.tokens, workers)
    training = Estimate(spec.steps * _step_s(d, head, spec), 0, PROCESS_BYTES + 2 * states + 16 * own)
    yield training.announced("training the guess head", spec.steps * spec.batch * spec.length, 1)


def _step_s(d: Decoder, head: GuessHead, spec: GuessSpec) -> float:
    """Seconds of an optimiser step, by the quicker of two with fewer answers: others on the machine only add to it."""
    few = replace(spec, steps=1, batch=min(spec.batch, 2))
    globals_ = array_specs(replace(d, vocab_size=head.shortlist), dict.fromkeys(PARTS, "f32"), [], profiled=False)
    ends = {name: torch.ones(s.shape) for name, s in globals_.items()}
    lesson = _Lesson.made(d, head, few, ends, torch.arange(head.shortlist))
    tokens = np.zeros((few.batch, few.length), np.int64)
    states = np.random.default_rng(0).standard_normal((*tokens.shape, len(head.states) * d.d_model), np.float32)
    found = []
    with computing_with(spec.threads):
        for _ in range(3):
            began = time.perf_counter()
            lesson.train(tokens, states.astype(np.float16))
            found.append(time.perf_counter() - began)
    return min(found[1:]) * spec.batch / few.batch  # the first one initialises libraries


def train_guess_head(
    checkpoint: Checkpoint,
    texts: tuple[Tokens, Tokens],
    spec: GuessSpec,
    pack: Callable[[Path], object],
    *,
    work: WorkFolder,
    inputs: str,
    progress: Progress,
) -> GuessWeights:
    """Train a guess head on a model's answers to two texts: those it learns from, and those it is measured on.

    `pack` writes the model's artifact, with an untrained head, to a path. What an earlier, killed run with the same
    `inputs` left in the folder is reused. Raises CorpusError for texts that are too short.
    """
    run = _Run(checkpoint, texts, spec, pack, work.path, inputs)
    tasks = run.tasks()
    needs = {name: [MODEL] for name in run.shards} | {HEAD: list(run.shards)}
    with computing_with(spec.threads):
        work.run(tasks, needs, lambda done: progress(len(done.intersection(tasks)), len(tasks)))
    return GuessWeights.load(work.path / HEAD)


@dataclass(frozen=True)
class _Run:
    """The tasks of one training; their files lie in `folder`."""

    checkpoint: Checkpoint
    texts: tuple[Tokens, Tokens]
    spec: GuessSpec
    pack: Callable[[Path], object]
    folder: Path
    inputs: str

    @cached_property
    def head(self) -> GuessHead:
        return new_head(self.checkpoint.decoder, self.spec)

    @cached_property
    def shards(self) -> dict[str, tuple[int, Tokens]]:
        """For each file of answers the number of its first one, and the prompts (N, T); those held out come last."""
        count = max(2, self.spec.tokens // self.spec.length // ANSWERS)
        kept = max(1, count // HELD_OUT)
        amounts, found = (count - kept, kept), list[Tokens]()
        for text, shards in zip(self.texts, amounts, strict=True):
            td.windows(text, self.spec.prompt)  # raises where the text is too short
            starts = np.linspace(0, len(text) - self.spec.prompt, shards * ANSWERS, dtype=np.int64)
            found += np.split(np.stack([text[at : at + self.spec.prompt] for at in starts]), shards)
        return {f"answers-{n}.npz": (n * ANSWERS, prompts) for n, prompts in enumerate(found)}

    @property
    def held_out(self) -> int:
        """How many of the files, the last ones, are held out."""
        return max(1, len(self.shards) // HELD_OUT)

    def tasks(self) -> dict[str, Callable[[], object]]:
        """Every task by the file that it makes."""
        draw = {
            name: partial(draw_answers, self.folder / MODEL, prompts, first, self.spec, self.folder / name)
            for name, (first, prompts) in self.shards.items()
        }
        return {MODEL: partial(self.pack, self.folder / MODEL), **draw, HEAD: self._train}

    def _train(self) -> None:
        files = [read_arrays(self.folder / name) for name in self.shards]
        tokens, states = (np.concatenate([f[name] for f in files]) for name in ("tokens", "states"))
        split = len(tokens) - self.held_out * ANSWERS
        lesson = _Lesson.of(self.checkpoint, self.head, self.spec, tokens[:split])
        torch.manual_seed(self.spec.seed)
        lesson.train(tokens[:split], states[:split])
        right = lesson.right(tokens[split:], states[split:])
        arrays = {name: w.detach().numpy() for name, w in lesson.w.items()} | {"ids": lesson.ids.numpy()}
        GuessWeights(self.head, arrays, right, self.inputs).save(self.folder / HEAD)


@dataclass(frozen=True)
class _Lesson:
    """A head that learns, and what it needs of its model."""

    decoder: Decoder
    head: GuessHead
    spec: GuessSpec
    w: dict[str, Tensor]
    ids: Tensor
    """The short list, rising."""
    embedding: Tensor
    ends: dict[str, Tensor]
    """Final norm and head of the model, of the short list alone."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, head: GuessHead, spec: GuessSpec, tokens: Tokens) -> "_Lesson":
        """The lesson on answers with these tokens: the short list are the most frequent ones, the lower of equals."""
        d, ends = checkpoint.decoder, td.global_weights(checkpoint, "cpu")
        counts = np.bincount(tokens.ravel(), minlength=d.vocab_size)
        ids = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[: head.shortlist]))
        return cls.made(d, head, spec, ends, ids)

    @classmethod
    def made(cls, d: Decoder, head: GuessHead, spec: GuessSpec, ends: dict[str, Tensor], ids: Tensor) -> "_Lesson":
        """The lesson with this short list; `ends` are what the model has beside its layers."""
        shapes = {name.removeprefix(PREFIX): s.shape for name, s in head.arrays(d) if s.format != "u32"}
        w, rows = first_weights(shapes, spec.seed), "embedding" if d.tied_head else "head"
        embedding, ends[rows] = ends["embedding"], ends[rows][ids]
        if "head_bias" in ends:
            ends["head_bias"] = ends["head_bias"][ids]
        if d.d_embedding == d.d_model:
            w["head"] = ends[rows].clone()
            if d.final_norm:
                w["norm"] = ends["final_norm/weight"].clone()
        return cls(d, head, spec, w, ids, embedding, ends)

    def train(self, tokens: Tokens, states: npt.NDArray[np.float16]) -> None:
        """Let it learn from answers (N, T) and their states (N, T, C·D)."""
        spec, weights = self.spec, [w.requires_grad_() for w in self.w.values()]
        optimiser = torch.optim.AdamW(weights, lr=spec.learning_rate, weight_decay=0.01)
        rng, order = np.random.default_rng(spec.seed), np.empty(0, np.int64)
        for step in range(spec.steps):
            if len(order) < spec.batch:
                order = np.concatenate([order, rng.permutation(len(tokens))])
            batch, order = order[: spec.batch], order[spec.batch :]
            share = (step + 1) / spec.steps
            rate = min(share / WARM_UP, 0.5 * (1 + np.cos(np.pi * share)))
            optimiser.param_groups[0]["lr"] = spec.learning_rate * rate
            loss = self._loss(tokens[batch], states[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimiser.step()

    def _loss(self, tokens: Tokens, states: npt.NDArray[np.float16]) -> Tensor:
        """Σ over drafted tokens of the cross-entropy between the model's distribution and the head's."""
        x = torch.from_numpy(states).float()
        with torch.no_grad():
            p = td.logits(self.decoder, self.ends, x[:, 1:, -self.decoder.d_model :]).softmax(-1)
        loss = torch.zeros(())
        for n, z in enumerate(self._unrolled(tokens, x)):
            loss = loss - LATER**n * (p[:, n:] * z[:, n:].log_softmax(-1)).sum(-1).mean()
        return loss

    def _unrolled(self, tokens: Tokens, x: Tensor) -> Iterator[Tensor]:
        """Logits (B, T − 1, S) of each unroll: at place p those of token p + 2."""
        ids = torch.from_numpy(tokens.astype(np.int64))
        run = Unrolled(self.head, self.w, self.embedding[ids[:, 1:]])
        g = torch.nn.functional.linear(x[:, :-1], self.w["fc"])
        for _ in range(self.spec.ahead):
            y = run.step(g)
            yield run.logits(y)
            g = shifted(y, 1)

    def right(self, tokens: Tokens, states: npt.NDArray[np.float16]) -> tuple[float, ...]:
        """The share of places, for each drafted token, in which the likeliest one is what the model's answer has."""
        found, wanted = np.zeros(self.spec.ahead), 0
        with torch.no_grad():
            for batch in np.array_split(np.arange(len(tokens)), -(-len(tokens) // self.spec.batch)):
                after = torch.from_numpy(tokens[batch].astype(np.int64))[:, 2:]
                first = self.spec.prompt
                wanted += after[:, first:].numel()
                for n, z in enumerate(self._unrolled(tokens[batch], torch.from_numpy(states[batch]).float())):
                    best = self.ids[z[:, :-1].argmax(-1)]
                    found[n] += int((best[:, first:] == after[:, first:]).sum())
        return tuple((found / wanted).tolist())
