"""A folder with text and small models, and a way to sparsify one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("accelerate")

import torch
from support.families import random_checkpoint
from support.sparsifying import small_recipe, write_text

Sparsify = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models so small are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text and a random SwiGLU model of each family, which no test changes."""
    folder = tmp_path_factory.mktemp("bases")
    write_text(folder / "text.txt")
    for name in ("mistral", "qwen2", "qwen3", "mixtral"):
        random_checkpoint(folder / name, name)
    random_checkpoint(folder / "llama", "llama-linear")
    random_checkpoint(folder / "model", "mistral")
    _as_plain_llama(folder / "model")
    return folder


def _as_plain_llama(folder: Path) -> None:
    """A Mistral without a window is a Llama."""
    from support.hf import edit_json

    edit_json(folder / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])


@pytest.fixture
def sparsified(bases: Path, tmp_path: Path) -> Sparsify:
    """Sparsifies a model of `bases`; takes changes of the recipe."""
    from pi_compile.sparsification.run import sparsify
    from pi_compile.sparsification.training import Watch

    def run(
        model: str = "model", output: str = "out", watch: Watch = Watch(), track: Sequence[str] = (), **changes: Any
    ) -> dict[str, Any]:
        recipe = bases / f"{tmp_path.name}-{output}.toml"
        recipe.write_text(small_recipe(model, **changes).to_toml())
        return sparsify(recipe, tmp_path / output, watch=watch, track=track)

    return run
