"""The answers that a guess head learns from: the model's own, with the states that it computes on the way.

An artifact of the model is run, so that the numbers are those that the head will read. An answer depends on its prompt
and its number alone, so any workers may draw them.

Shape letters: N answers, T tokens of each with its prompt, C·D states of some layers side by side.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pi_compile.files import write_arrays
from pi_compile.training.guess.spec import GuessSpec
from pi_runtime.artifact.footprint import BLOCK_TOKENS
from pi_runtime.execution.executor import SequenceStep

Ints = npt.NDArray[np.integer]

ANSWERS = 16
"""Answers of a task, which are drawn together."""


def draw_answers(model_path: Path, prompts_NT: Ints, first: int, spec: GuessSpec, output: Path) -> None:
    """Draw the answer to each prompt, at temperature 1; writes their tokens and states. `first`: the first's number."""
    from pi_runtime import Engine, Sampling, load  # noqa: PLC0415  loads numba

    with load(model_path, threads=spec.threads, device="cpu") as model:
        prefix = list(model.manifest.text.prefix_ids)
        prompts = [[*prefix, *prompt][: spec.prompt] for prompt in prompts_NT.tolist()]
        count = spec.length - len(prompts[0])
        with Engine(model, slots=len(prompts), speculate="off") as engine:
            streams = [
                engine.generate(
                    prompt,
                    max_tokens=count,
                    min_tokens=count,
                    sampling=Sampling(temperature=1.0, seed=spec.seed, number=first + n),
                )
                for n, prompt in enumerate(prompts)
            ]
            for stream in streams:
                "".join(stream)
            answers = [[*prompt, *stream.token_ids] for prompt, stream in zip(prompts, streams, strict=True)]
        states = []
        for tokens in answers:
            cache, parts = model.new_cache(), []
            for start in range(0, spec.length, BLOCK_TOKENS):
                part = np.array(tokens[start : start + BLOCK_TOKENS], np.int64)
                (result,) = model.executor.step([SequenceStep(cache=cache, tokens=part, select=True, states=True)])
                parts.append(result.states_TC)
            states.append(np.concatenate([part for part in parts if part is not None]))
    largest = np.finfo(np.float16).max
    found = {"tokens": np.array(answers, np.int32), "states": np.clip(states, -largest, largest).astype(np.float16)}
    write_arrays(output, found)
