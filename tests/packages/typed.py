"""A program of a user, whom strict mypy must understand: the types of the installed package are those it says."""

from pathlib import Path

from pi_compile import open_checkpoint, pack
from pi_runtime import Engine, Grammar, Model, Sampling, load


def answer(artifact: Path, prompt: str) -> str:
    with load(artifact, mode="gate") as model:
        return "".join(model.generate(prompt, max_tokens=8, sampling=Sampling(temperature=0.0, seed=1)))


def answers(model: Model, prompts: list[str]) -> list[str]:
    engine = Engine(model, slots=4)
    return ["".join(engine.generate(prompt, grammar=Grammar.regex("[0-9]+"))) for prompt in prompts]


def likeliest(model: Model, tokens: list[int]) -> int:
    return int(model.logits(tokens)[-1].argmax())


def compiled(checkpoint: Path, artifact: Path) -> None:
    pack(open_checkpoint(str(checkpoint)), artifact)
