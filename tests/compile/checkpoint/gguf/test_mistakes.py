"""What is wrong with a GGUF file: named errors with exit code 3, before any long work."""

import contextlib
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from support.gguf_files import rounded_checkpoint, write_gguf
from support.refused_checkpoints import refusal

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError
from pi_compile.planning.model_config import find_planned


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {case: tmp_path_factory.mktemp("gguf") / case for case in ("llama", "mixtral")}
    for case, folder in found.items():
        rounded_checkpoint(folder, case, "f16")
    return found


@pytest.fixture
def file(folders: dict[str, Path], tmp_path: Path) -> Path:
    write_gguf(folders["llama"], tmp_path / "model.gguf", "f16")
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A file, and where its values begin."""
    path = tmp_path_factory.mktemp("header") / "model.gguf"
    write_gguf(folders["mixtral"], path, "f16")
    return path.read_bytes(), int(GGUFReader(path).data_offset)


def refusal_of(folder: Path, path: Path, **changes: Any) -> str:
    write_gguf(folder, path, "f16", **changes)
    message = refusal(path)
    assert str(path) in message
    return message


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 100, 500, 1500, -1])
def test_a_file_that_ends_early(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    assert "not a whole GGUF file" in refusal(file)


def test_another_format(file: Path) -> None:
    file.write_bytes(b"PK\3\4" + file.read_bytes()[4:])
    assert "not a whole GGUF file" in refusal(file)


def test_a_pointer_instead_of_the_file(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(file)


@pytest.mark.parametrize("kind", [0, 8, 9], ids=["bytes", "strings", "arrays"])
def test_a_list_that_announces_more_than_the_file_holds(file: Path, kind: int) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a"
    file.write_bytes(header + struct.pack("<IIQ", 9, kind, 2**60))
    assert "not a whole GGUF file" in refusal(file)


@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
def test_changed_bytes_are_an_error_or_nothing(whole: tuple[bytes, int], flips: list[tuple[float, int]]) -> None:
    data = bytearray(whole[0])
    for place, value in flips:
        data[int(place * whole[1])] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError):
            open_checkpoint(path)


def test_a_plan_without_weights(file: Path) -> None:
    with pytest.raises(CheckpointError, match="a GGUF file is not planned for"):
        find_planned("model.gguf", file.parent)


def test_several_in_a_folder(file: Path) -> None:
    file.with_name("other.gguf").write_bytes(file.read_bytes())
    assert "name one of its GGUF files" in refusal(file.parent)


def test_a_revision_of_a_file(file: Path) -> None:
    with pytest.raises(CheckpointError, match="revision 'main' is given for a local file"):
        open_checkpoint(file, "main")


CHANGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "architecture": (
        {"general.architecture": "gemma2"},
        ("architecture 'gemma2'", "llama, arcee, falcon, gpt2, granite, granitemoe, nemotron, olmo2"),
    ),
    "adapter": ({"general.type": "adapter"}, ("not a model",)),
    "part": ({"split.count": 3}, ("one of 3 parts", "llama-gguf-split --merge")),
    "parts in a list": ({"split.count": [3]}, ("one of [3] parts",)),
    "unknown-key": ({"ARCH.new_trick": 1}, ("llama.new_trick", "not understood")),
    "no-context": ({"ARCH.context_length": None}, ("no llama.context_length",)),
    "vocabulary": ({"ARCH.vocab_size": 300}, ("do not have the shape that its metadata calls for",)),
    "width": ({"ARCH.embedding_length": 32}, ("do not have the shape",)),
    "fewer-layers": ({"ARCH.block_count": 1}, ("its metadata does not account for", "blk.1.")),
    "more-layers": ({"ARCH.block_count": 3}, ("tensors that its metadata calls for are missing", "blk.2.")),
    "far-more-layers": ({"ARCH.block_count": 2**31 - 1}, ("block_count does not fit its tensors",)),
    "kv-heads": ({"ARCH.attention.head_count_kv": 4}, ("do not have the shape",)),
    "heads-by-layer": ({"ARCH.attention.head_count_kv": [2, 1]}, ("num_key_value_heads", "positive integer")),
    "values-of-heads": ({"ARCH.attention.value_length": 16}, ("values are 16 wide",)),
    "partial-rotation": ({"ARCH.rope.dimension_count": 12}, ("rope.dimension_count", "whole heads")),
    "window": ({"ARCH.attention.sliding_window": 39}, ("attention.sliding_window would change", "40 or more")),
    "cap": ({"ARCH.final_logit_softcapping": 30.0}, ("final_logit_softcapping would change the function",)),
    "attention-cap": ({"ARCH.attn_logit_softcapping": 50.0}, ("attn_logit_softcapping would change",)),
    "logit-scale": ({"ARCH.logit_scale": 0.5}, ("logit_scale would change",)),
    "clamp": ({"ARCH.attention.clamp_kqv": 8.0}, ("clamp_kqv would change",)),
    "not-causal": ({"ARCH.attention.causal": False}, ("attention.causal would change",)),
    "longrope": ({"ARCH.rope.scaling.type": "longrope"}, ("short_factor", "positive numbers")),
    "odd-rope": ({"ARCH.rope.scaling.type": "spiral"}, ("rope type", "spiral")),
    "yarn-factor": ({"ARCH.rope.scaling.yarn_attn_factor": 0.5}, ("yarn_attn_factor would change",)),
    "missing": (
        {"tensors": {"blk.1.ffn_up.weight": None}},
        ("1 tensors that its metadata calls for", "blk.1.ffn_up.weight"),
    ),
    "further": ({"tensors": {"blk.0.attn_sinks": (np.ones(4, np.float32), Type.F32)}}, ("blk.0.attn_sinks",)),
    "divisors": (
        {"tensors": {"rope_freqs.weight": (np.ones(11, np.float32), Type.F32)}},
        ("rope_freqs.weight", "12 positive numbers"),
    ),
    "divided-by-nothing": (
        {"tensors": {"rope_freqs.weight": (np.zeros(12, np.float32), Type.F32)}},
        ("rope_freqs.weight", "12 positive numbers"),
    ),
    "ternary": (
        {"tensors": {"blk.0.ffn_up.weight": (np.zeros((96, 54), np.uint8), Type.TQ1_0)}},
        ("blk.0.ffn_up.weight TQ1_0", "F32, F16, Q4_0", "IQ4_XS", "Q4_K_M"),
    ),
    "wider-blocks": (
        {"tensors": {"blk.0.ffn_up.weight": (np.zeros((96, 144), np.uint8), Type.Q4_K)}},
        ("do not have the shape", "blk.0.ffn_up.weight (96, 256)"),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_file_says_is_held_against_what_it_has(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    changes, words = CHANGES[case]
    message = refusal_of(folders["llama"], tmp_path / "model.gguf", **changes)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"ARCH.expert_count": 4}, "expert_count does not fit its tensors"),
        ({"ARCH.expert_count": 2**31 - 1}, "expert_count does not fit its tensors"),
        ({"tensors": {"blk.1.ffn_gate_inp.weight": (np.ones((4, 64), np.float32), Type.F32)}}, "do not have the shape"),
        ({"ARCH.expert_count": None, "ARCH.expert_used_count": None}, "missing"),
        ({"ARCH.expert_used_count": None}, "expert_used_count does not fit its tensors"),
        ({"ARCH.expert_used_count": 0}, "expert_used_count does not fit its tensors"),
        ({"ARCH.expert_used_count": 9}, "at most 5 experts"),
        ({"ARCH.expert_weights_scale": 2.5}, "expert_weights_scale would change"),
        ({"ARCH.expert_weights_norm": False}, "expert_weights_norm would change"),
        ({"ARCH.expert_gating_func": 2}, "expert_gating_func would change"),
        ({"ARCH.expert_shared_count": 1}, "expert_shared_count would change"),
    ],
)
def test_experts(changes: dict[str, Any], word: str, folders: dict[str, Path], tmp_path: Path) -> None:
    assert word in refusal_of(folders["mixtral"], tmp_path / "model.gguf", **changes)


def test_values_that_change_nothing(file: Path, folders: dict[str, Path]) -> None:
    wanted = open_checkpoint(file).decoder
    neutral = {"ARCH.attention.sliding_window": 40, "ARCH.logit_scale": 0.0, "ARCH.attention.causal": True}
    others = {"ARCH.rope.scaling.type": "none", "ARCH.expert_count": 0, "maker.of.the.file": "anyone"}
    write_gguf(folders["llama"], file, "f16", **neutral, **others)
    assert open_checkpoint(file).decoder == wanted


def test_a_key_that_the_user_knows_to_be_harmless(file: Path, folders: dict[str, Path]) -> None:
    write_gguf(folders["llama"], file, "f16", **{"ARCH.new_trick": 1})
    assert any("llama.new_trick" in line for line in open_checkpoint(file, None, ["llama.new_trick"]).notices)


def test_weights_that_are_no_numbers(file: Path, folders: dict[str, Path]) -> None:
    broken = np.full((96, 64), np.nan, np.float32)
    write_gguf(folders["llama"], file, "f16", tensors={"blk.0.ffn_up.weight": (broken, Type.F16)})
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight holds NaN"):
        open_checkpoint(file).values("layers/0/ffn/rest")


def test_a_file_without_a_tokenizer(file: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read the tokenizer") as caught:
        _ = open_checkpoint(file).text_files
    assert "with a tokenizer of the kind llama or gpt2" in str(caught.value)
