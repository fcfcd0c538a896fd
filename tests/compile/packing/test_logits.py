"""A packed model computes the checkpoint's function: logits and greedy text equal transformers'."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.hf import random_llama, random_opt
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pi_compile.checkpoint import open_checkpoint
from pi_compile.packing import PackSpec, pack
from pi_runtime import load
from pi_runtime.artifact.sizes import PARTS

ODD = {
    "hidden_size": 45,
    "intermediate_size": 131,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "vocab_size": 149,
    "max_position_embeddings": 90,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-relu": (random_llama, {}),
    "llama-silu-gqa-odd": (random_llama, {"hidden_act": "silu", **ODD}),
    "llama-relu-odd-biases": (random_llama, {**ODD, **BIASES}),
    "llama-silu-tied-biases": (random_llama, {"hidden_act": "silu", "tie_word_embeddings": True, **BIASES}),
    "llama-full-heads": (random_llama, {"num_key_value_heads": 3, "head_dim": 2, "intermediate_size": 1}),
    "llama-theta-eps": (
        random_llama,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "rms_norm_eps": 0.1},
    ),
    "opt": (random_opt, {}),
    "opt-untied-odd": (random_opt, {"tie_word_embeddings": False, "ffn_dim": 65, "num_attention_heads": 2}),
    "opt-no-bias": (random_opt, {"enable_bias": False}),
}
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def packed(folder: Path, output: Path, fmt: str = "keep") -> Path:
    pack(open_checkpoint(folder), PackSpec(formats=dict.fromkeys(PARTS, fmt)), output, recipe={})
    return output


@contextmanager
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def theirs(model: PreTrainedModel, windows: np.ndarray) -> np.ndarray:
    """Logits (windows · T, V) in float32."""
    with one_torch_thread():
        logits = model(input_ids=torch.from_numpy(windows)).logits
    return logits.numpy().reshape(-1, logits.shape[-1])


def ours(artifact: Path, windows: np.ndarray, mode: str = "dense") -> np.ndarray:
    with load(artifact, mode=mode, context=windows.shape[1]) as model:
        return np.concatenate([model.logits(window) for window in windows])


def assert_equal_logits(found: np.ndarray, wanted: np.ndarray, fmt: str = "f32") -> None:
    """Keys and values beside weights of 16 bits are kept in float16, whose steps are 2⁻¹¹ of a number."""
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    most = np.abs(wanted).max() * (1e-4 if fmt == "f32" else 1e-2)
    assert np.abs(found - wanted).max() <= most
    assert np.sqrt(((found - wanted) ** 2).mean()) <= np.abs(wanted).max() * (1e-4 if fmt == "f32" else 5e-4)
    second, first = np.sort(wanted, 1)[:, -2:].T
    clear = (first - second > 2 * most) | (fmt == "f32")
    assert clear.mean() > 0.3
    np.testing.assert_array_equal(found.argmax(1)[clear], wanted.argmax(1)[clear])


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_random_checkpoints(case: str, fmt: str, tmp_path: Path) -> None:
    """The stored numbers are kept; the arithmetic on both sides is float32."""
    make, overrides = CASES[case]
    model = make(tmp_path, dtype=DTYPES[fmt], **overrides).float()
    vocabulary, positions = model.config.vocab_size, model.config.max_position_embeddings
    windows = np.random.default_rng(0).integers(0, vocabulary, (2, positions))
    wanted = theirs(model, windows)
    path = packed(tmp_path, tmp_path / "model.pi")
    for mode in ("dense", "gate"):
        assert_equal_logits(ours(path, windows, mode), wanted, fmt)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_an_artifact_rounds_as_torch_does(fmt: str, tmp_path: Path) -> None:
    """A float32 checkpoint packed into 16 bits is the checkpoint that torch would have rounded (norms excepted)."""
    model = random_llama(tmp_path)
    path = packed(tmp_path, tmp_path / "model.pi", fmt)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.to(DTYPES[fmt]).float()
    windows = np.random.default_rng(0).integers(0, 131, (1, 64))
    assert_equal_logits(ours(path, windows), theirs(model, windows), fmt)


# Real models

TEXTS = {"stories260K": "tinyshakespeare.txt", "novels-relu": "novels-heldout/Conrad_Nostromo_1904.txt"}
ONCE = "Once upon a time"


def real_tokens(shared: Path, name: str) -> np.ndarray:
    """1,024 tokens of real text in two windows of the whole context, each from the beginning of a text."""
    text = (shared / "data" / TEXTS[name]).read_text(encoding="utf-8")[:8000]
    ids = AutoTokenizer.from_pretrained(shared / "models" / name)(text, add_special_tokens=False)["input_ids"]
    return np.array(ids[:1024]).reshape(2, 512)


def real_model(shared: Path, name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(shared / "models" / name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def stories(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(shared / "models" / "stories260K", tmp_path_factory.mktemp("stories") / "stories.pi")


@pytest.mark.shared
@pytest.mark.parametrize("name", TEXTS)
def test_real_models(shared: Path, tmp_path: Path, name: str) -> None:
    windows = real_tokens(shared, name)
    wanted = theirs(real_model(shared, name), windows)
    folder = shared / "models" / name
    exact = packed(folder, tmp_path / "f32.pi", "f32")
    dense = ours(exact, windows)
    assert_equal_logits(dense, wanted)
    np.testing.assert_array_equal(ours(exact, windows, "gate"), dense)


@pytest.mark.shared
def test_greedy_text_equals_transformers(shared: Path, stories: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    reference = real_model(shared, "stories260K")
    prompt = tokenizer(ONCE, return_tensors="pt")
    with one_torch_thread():
        whole = reference.generate(**prompt, max_new_tokens=100, do_sample=False)[0].tolist()
    wanted = whole[prompt["input_ids"].shape[1] :]
    assert len(wanted) == 100
    for mode in ("dense", "gate"):
        with load(stories, mode=mode) as model:
            assert model.tokenizer.encode(ONCE) == prompt["input_ids"][0].tolist()
            answer = model.generate(ONCE, max_tokens=100)
            text = "".join(answer)
        assert answer.token_ids == wanted
        assert ONCE + text == tokenizer.decode(whole, skip_special_tokens=True)
    assert text.startswith(", there was a little girl named Lily. She loved to play outside in the park.")


@pytest.mark.slow
@pytest.mark.shared
def test_the_command_says_the_same(stories: Path) -> None:
    with load(stories) as model:
        text = "".join(model.generate(ONCE, max_tokens=100))
    command = [sys.executable, "-m", "pi_runtime", str(stories), "--prompt", ONCE, "--max-tokens", "100"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True)
    assert done.stdout == text + "\n"


# Threads

DIGEST = """
import hashlib, json, sys
import numpy as np
from pi_runtime import load
from pi_runtime.execution.pages import by_position

found = {}
for path in sys.argv[1:]:
    for mode in ("dense", "gate", "predicted"):
        for threads in (1, 2, 3, 5):
            with load(path, mode=mode, threads=threads) as model:
                ids = np.random.default_rng(1).integers(0, 200, 131)
                cache = model.new_cache()
                prefill = model.generate(ids[:100], max_tokens=1, cache=cache)
                "".join(prefill)
                steps = [model.decode(int(token), cache)[0] for token in ids[100:]]
                pages = ([by_position(layer) for layer in page] for page in cache.page_values())
                held = np.concatenate(list(pages), axis=3)[:, :, :, : cache.length]
                bits = [model.logits(ids), held, np.stack(steps)]
                digest = hashlib.sha256(b"".join(part.tobytes() for part in bits)).hexdigest()
            found.setdefault(f"{path} {mode}", set()).add(digest)
print(json.dumps({case: sorted(digests) for case, digests in found.items()}))
"""


def digests(paths: list[Path], most_threads: int, layer: str) -> dict[str, list[str]]:
    environment = {**os.environ, "NUMBA_NUM_THREADS": str(most_threads), "NUMBA_THREADING_LAYER": layer}
    command = [sys.executable, "-c", DIGEST, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    """Logits, cache and decoding, prefill included: 1, 2, 3 and 5 threads, whichever library runs them."""
    from support.synthetic import random_artifact, small_decoder

    shape = {"d_model": 300, "d_ff": 500, "n_heads": 5, "n_kv_heads": 5, "head_dim": 12, "context_length": 140}
    paths = [
        random_artifact(tmp_path / f"{family}.pi", small_decoder(family, **shape), format=fmt, ranks=[30, 7])
        for family, fmt in (("llama", "bf16"), ("opt", "f16"))
    ]
    found = digests(paths, 5, "default")
    assert len(found) == 6
    assert [len(different) for different in found.values()] == [1] * 6
    # What does not fire is skipped exactly: dense and gate differ in no bit, and prediction does.
    assert len({different[0] for different in found.values()}) == 4
    assert digests(paths, 5, "workqueue") == found
