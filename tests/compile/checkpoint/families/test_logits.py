"""Every family computes what transformers computes, packed and as profiling sees it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from support.families import CASES, LLAMA, random_checkpoint, random_sizes
from support.long_form import marked_long

from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_compile.torch_model import decoder as td
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.kernels import reference


def packed(checkpoint: Checkpoint, path: Path, **formats: str) -> np.ndarray:
    """Logits of some tokens from the artifact, by the definition."""
    pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, "keep") | formats), path, recipe={})
    with Artifact.open(path) as artifact:
        return reference.forward(artifact, tokens(checkpoint))


def compiled(checkpoint: Checkpoint, path: Path) -> Iterator[np.ndarray]:
    """The same logits from the runtime, in every exact mode."""
    for mode in ("dense", "gate"):
        with load(path, mode=mode, threads=1) as model:
            yield model.logits(tokens(checkpoint))


def profiled(checkpoint: Checkpoint) -> np.ndarray:
    """The same logits from the decoder of profiling and training."""
    d, ends = checkpoint.decoder, td.global_weights(checkpoint, "cpu")
    x = td.embed(d, ends, torch.from_numpy(tokens(checkpoint))[None])
    *_, (x,) = td.layers(d, td.stored_layers(checkpoint, "cpu"), [x])
    return td.logits(d, ends, x)[0].numpy()


def tokens(checkpoint: Checkpoint) -> np.ndarray:
    """One token for each position of the context."""
    d = checkpoint.decoder
    return np.random.default_rng(0).integers(0, d.vocab_size, d.context_length)


def theirs(model: Any, checkpoint: Checkpoint) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(input_ids=torch.from_numpy(tokens(checkpoint))[None]).logits[0].numpy()
    return found


def assert_equal_logits(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
    np.testing.assert_array_equal(found.argmax(1), wanted.argmax(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, case)
    checkpoint, path = open_checkpoint(tmp_path), tmp_path / "a.pi"
    wanted = theirs(model, checkpoint)
    for found in (profiled(checkpoint), packed(checkpoint, path), *compiled(checkpoint, path)):
        assert_equal_logits(found, wanted)


@pytest.mark.parametrize("case", marked_long(CASES, list(CASES)[1::2]))
def test_whatever_the_sizes(case: str, tmp_path: Path, long: bool) -> None:
    for seed in range(5 if long else 1):
        folder = tmp_path / str(seed)
        model = random_checkpoint(folder, case, sizes=random_sizes(case, seed))
        checkpoint = open_checkpoint(folder)
        wanted = theirs(model, checkpoint)
        for found in (profiled(checkpoint), packed(checkpoint, folder / "a.pi")):
            assert_equal_logits(found, wanted)


END = LLAMA["eos_token_id"]
SINGLE = {
    "arcee",
    "bitnet",
    "deepseek-v2",
    "deepseek-v3",
    "gemma3",
    "gemma4-experts",
    "glm4-moe",
    "gpt-oss",
    "granite",
    "granite-hybrid-experts",
    "granitemoe",
    "lfm2",
    "lfm2-moe",
    "nanochat",
    "nemotron-h-experts",
    "olmo2",
    "olmoe",
    "qwen3-moe-unnormalised",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "smollm3",
}
IN_FILES = sorted(SINGLE | {"smallthinker"})
"""In the short form every second one, and the others' greedy text."""


@pytest.mark.parametrize("case", marked_long(IN_FILES, IN_FILES[1::2]))
def test_bf16_in_split_files(case: str, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, case, shard="20KB", dtype=torch.bfloat16)
    model = model.float() if isinstance(model, torch.nn.Module) else model
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.formats().values()) == {"bf16"}
    assert_equal_logits(profiled(checkpoint), theirs(model, checkpoint))
    # Beside attention of 16 bits keys and values are rounded to float16.
    assert_equal_logits(packed(checkpoint, tmp_path / "a.pi", attention="f32"), theirs(model, checkpoint))


@pytest.mark.parametrize("case", marked_long(sorted(SINGLE), IN_FILES[::2]))
def test_greedy_text(case: str, tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, case)
    checkpoint, path = open_checkpoint(tmp_path), tmp_path / "a.pi"
    pack(checkpoint, PackSpec(formats=dict.fromkeys(PARTS, "keep")), path, recipe={})
    with load(path, threads=1) as ours:
        prompt = torch.tensor([ours.tokenizer.encode("the quick")])
        every = torch.ones_like(prompt)  # also what looks like padding
        found = model.generate(prompt, attention_mask=every, max_new_tokens=20, do_sample=False)
        wanted = found[0, prompt.shape[1] :].tolist()
        wanted = wanted[: wanted.index(END)] if END in wanted else wanted
        answer = ours.generate("the quick", max_tokens=20)
        before, whole = (ours.tokenizer.decode(ids) for ids in (prompt[0].tolist(), [*prompt[0].tolist(), *wanted]))
        assert "".join(answer) == whole.removeprefix(before)
        assert [*answer.token_ids] == wanted
