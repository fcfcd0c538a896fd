"""Logits of a GGUF file are those that llama.cpp computes from the same file, within its own rounding.

llama.cpp's Python package is not a dependency. LLAMA_CPP_PYTHON names an interpreter that has it.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tokenizers

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type
from support.gguf_files import (
    CASES,
    random_blocks,
    rounded_checkpoint,
    write_byte_tokenizer,
    write_dequantised,
    write_gguf,
    write_parts,
)

from pi_compile.checkpoint import open_checkpoint
from pi_compile.checkpoint.gguf.file import BLOCK_TYPES
from pi_compile.packing import PackSpec, pack
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import PARTS
from pi_runtime.kernels import reference

PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
SCRIPT = Path(__file__).parents[3] / "support" / "llama_cpp_process.py"
IDS = np.random.default_rng(0).integers(0, 307, 40)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Rows of whole blocks of 256."""


EXACT = 5e-3
"""Share of the logits' deviation for sums in another order; llama.cpp looks GELU up in a table of binary16."""


@cache
def has_llama_cpp() -> bool:
    return subprocess.run([PYTHON, "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0


@pytest.fixture(autouse=True)
def _needs_llama_cpp() -> None:
    if not has_llama_cpp():
        pytest.skip(f"{PYTHON} has no llama_cpp")


def llama_cpp(*arguments: object) -> None:
    ran = subprocess.run([PYTHON, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def of_llama_cpp(file: Path, tokens: np.ndarray = IDS) -> np.ndarray:
    ids, logits = file.with_suffix(".ids.npy"), file.with_suffix(".logits.npy")
    np.save(ids, tokens)
    llama_cpp("logits", file, ids, logits)
    return np.load(logits)


def ours(file: Path, tokens: np.ndarray = IDS) -> np.ndarray:
    """Logits of an artifact whose parts are all f32."""
    path, spec = file.with_suffix(".pi"), PackSpec(formats=dict.fromkeys(PARTS, "f32"))
    pack(open_checkpoint(file), spec, path, recipe={})
    with Artifact.open(path) as artifact:
        return reference.forward(artifact, tokens)


def written(folder: Path, case: str, kind: str, tensors: Any = MappingProxyType({}), **sizes: int) -> Path:
    rounded_checkpoint(folder / "hf", case, kind, **sizes)
    write_byte_tokenizer(folder / "hf")
    write_gguf(folder / "hf", folder / "model.gguf", kind, tensors=dict(tensors))
    return folder / "model.gguf"


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float = EXACT) -> None:
    """Largest difference, relative to the deviation of the logits; the best token where the second is not as close."""
    allowed = tolerance * wanted.std()
    assert np.abs(found - wanted).max() <= allowed
    second, best = np.sort(wanted, axis=1)[:, -2:].T
    clear = best - second > 2 * allowed
    np.testing.assert_array_equal(found.argmax(1)[clear], wanted.argmax(1)[clear])


@pytest.mark.parametrize("case", CASES)
def test_every_architecture(case: str, tmp_path: Path) -> None:
    file = written(tmp_path, case, "f32", vocab_size=307)
    assert_close(ours(file), of_llama_cpp(file))


@pytest.mark.parametrize("case", ["qwen2", "llama-linear"])
def test_a_scaling_without_a_factor(case: str, tmp_path: Path) -> None:
    file = written(tmp_path, case, "f32")
    write_gguf(tmp_path / "hf", file, "f32", **{"ARCH.rope.scaling.factor": None})
    assert_close(ours(file), of_llama_cpp(file))


@pytest.mark.parametrize("kind", sorted(BLOCK_TYPES), ids=lambda kind: kind.name)
def test_every_block_type(kind: Type, tmp_path: Path) -> None:
    """In the embedding, whose rows llama.cpp dequantises; elsewhere it rounds the other factor too."""
    blocks = {"token_embd.weight": (random_blocks(kind, 307, 256, 0), kind)}
    file = written(tmp_path, "llama", "f32", **WIDE, tensors=blocks)
    assert_close(ours(file), of_llama_cpp(file))


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_1", "Q5_0", "IQ4_NL", "IQ4_XS"])
def test_files_of_llama_quantize(name: str, tmp_path: Path) -> None:
    """Ours are the logits of the values in the file; llama.cpp is off by what it rounds of the other factors."""
    quantised, values = tmp_path / "quantised.gguf", tmp_path / "values.gguf"
    llama_cpp("quantise", written(tmp_path, "llama", "f32", **WIDE), quantised, name)
    write_dequantised(quantised, values)
    found, exact, rounded = ours(quantised), of_llama_cpp(values), of_llama_cpp(quantised)
    assert_close(found, exact)
    own_rounding = np.abs(rounded - exact).max() / exact.std()
    assert_close(found, rounded, own_rounding + EXACT)
    assert (found - rounded).std() <= 0.1 * exact.std()


def test_text(tmp_path: Path) -> None:
    """The demo model reads text; its activation counts as SiLU here, which is what llama.cpp computes."""
    demo = Path("recipes/demo")
    write_gguf(demo, tmp_path / "model.gguf", "f32")
    llama_cpp("quantise", tmp_path / "model.gguf", tmp_path / "quantised.gguf", "Q4_K_M")
    write_dequantised(tmp_path / "quantised.gguf", tmp_path / "values.gguf")
    tokens = tokenizers.Tokenizer.from_file(str(demo / "tokenizer.json"))
    ids = np.array(tokens.encode(Path("docs/explanation/pipeline.md").read_text(encoding="utf-8")).ids[:200])
    found = ours(tmp_path / "quantised.gguf", ids)
    exact, rounded = (of_llama_cpp(tmp_path / f"{name}.gguf", ids) for name in ("values", "quantised"))
    assert_close(found, exact)
    np.testing.assert_array_equal(found.argmax(1), exact.argmax(1))
    assert (found - rounded).std() <= 0.02 * exact.std()
    assert (found.argmax(1) == rounded.argmax(1)).mean() >= 0.95


def test_parts(tmp_path: Path) -> None:
    parts = write_parts(written(tmp_path, "llama", "f32"), tmp_path, 7)
    assert_close(ours(parts[0]), of_llama_cpp(parts[0]))
