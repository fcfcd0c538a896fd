"""What the guess stage is asked for, and a guess head before its training."""

from dataclasses import dataclass

import numpy as np

from pi_compile.checkpoint import Checkpoint
from pi_compile.results import GuessWeights
from pi_runtime.artifact.decoder import Decoder
from pi_runtime.artifact.guess_head import PREFIX, GuessHead


@dataclass(frozen=True, kw_only=True)
class GuessSpec:
    """How a guess head is trained."""

    tokens: int
    """Tokens of answers, prompts included, that it is trained on."""
    steps: int
    """Optimiser steps."""
    shortlist: int
    """Tokens that it can draft: the most frequent ones of the answers."""
    seed: int
    threads: int
    """Threads that a task computes with."""
    format: str = "q8"
    """Number format of its matrices in the artifact."""
    prompt: int = 32
    """Tokens of the text that an answer goes on from."""
    length: int = 128
    """Tokens of a prompt with its answer."""
    batch: int = 8
    """Answers in an optimiser step."""
    learning_rate: float = 1e-3
    ahead: int = 3
    """Tokens that it learns to draft behind each other."""


def new_head(d: Decoder, spec: GuessSpec) -> GuessHead:
    """The head of a model: as wide as one of its layers, reading three of its states, the last one among them."""
    states = sorted({d.n_layers // 3, 2 * d.n_layers // 3, d.n_layers})
    frequencies = d.rotary_frequencies
    if not frequencies or min(frequencies) <= 0:
        frequencies = tuple((10000.0 ** -(np.arange(0, d.head_dim - 1, 2, dtype=np.float64) / d.head_dim)).tolist())
    return GuessHead(
        states=tuple(states),
        format=spec.format,
        shortlist=min(spec.shortlist, d.vocab_size),
        n_heads=d.n_heads,
        n_kv_heads=d.n_kv_heads,
        head_dim=d.head_dim,
        d_ff=max(32, 8 * d.d_model // 3),
        norm_eps=d.norm_eps,
        rotary_frequencies=frequencies,
    )


def untrained(checkpoint: Checkpoint, spec: GuessSpec) -> GuessWeights:
    """A head that says nothing yet: an artifact with it gives the states that training reads."""
    d = checkpoint.decoder
    head = new_head(d, spec)
    arrays = {name.removeprefix(PREFIX): np.zeros(s.shape, np.float32) for name, s in head.arrays(d)}
    return GuessWeights(head, arrays | {"ids": np.arange(head.shortlist)})
