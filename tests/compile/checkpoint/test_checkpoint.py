"""What users get wrong about a checkpoint: each with its message and exit code, before any long work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from support.hf import edit_json, edit_tensors, random_llama
from support.refused_checkpoints import refusal

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_llama(tmp_path / "model", tokenizer=False)
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    random_llama(tmp_path / "sharded", tokenizer=False, shard="20KB")
    return tmp_path / "sharded"


Prepare = Callable[[Path], object]


def only(name: str) -> Prepare:
    """One file alone is in the folder."""

    def prepare(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        if name:
            (folder / name).write_text("{}")

    return prepare


def config(text: str = "", **changed: object) -> Prepare:
    if changed:
        return lambda folder: edit_json(folder / "config.json", **changed)
    return lambda folder: (folder / "config.json").write_text(text, encoding="latin-1")


def weights(content: bytes) -> Prepare:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def cut(name: str, keep: float, **made: bool) -> Prepare:
    """So many bytes, or that share of them, are left of a file."""

    def prepare(folder: Path) -> None:
        shutil.rmtree(folder)
        random_llama(folder, tokenizer=False, **made)
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])

    return prepare


def list_in_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")


def tensors(*removed: str, **changed: torch.Tensor) -> Prepare:
    return lambda folder: edit_tensors(folder, *removed, **changed)


STRAY_TENSORS = ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.bias", "score")
UNREAD = (torch.float64, torch.int8, torch.float8_e4m3fn)
WRONG: list[tuple[str, Prepare, tuple[str, ...]]] = [
    ("an empty folder", only(""), ("no config.json", "an empty folder")),
    ("an adapter", only("adapter_config.json"), ("merge it into its base model",)),
    *((f"broken config {text!r}", config(text), ("config.json: ",)) for text in ("", "{", "[]", "\x00\xff")),
    ("a classifier", config(architectures=["LlamaForSequenceClassification"]), ("LlamaForCausalLM",)),
    ("no weights", lambda f: (f / "model.safetensors").rename(f / "weights.h5"), ("no weights", "weights.h5")),
    ("a pointer", weights(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"), ("git lfs pull",)),
    *(
        (f"{keep} of weights", cut("model.safetensors", keep), ("model.safetensors: not a whole safetensors file",))
        for keep in (0, 7, 1000, 0.5, 0.999)
    ),
    *(
        (f"{n} of a pickle", cut("pytorch_model.bin", n, pickled=True), ("pytorch_model.bin: not a whole torch file",))
        for n in (0, 100, 0.5, 0.99)
    ),
    ("a list in a pickle", list_in_a_pickle, ("not a state dict",)),
    (
        "missing tensors",
        tensors("model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
        ("2 tensors that config.json calls for are missing", "model.layers.1.mlp.up_proj.weight"),
    ),
    *(
        (name, tensors(**{name: torch.ones(10)}), ("1 tensors that config.json does not account for", name))
        for name in STRAY_TENSORS
    ),
    ("other shapes", config(intermediate_size=84), ("9 tensors do not have the shape", "(84, 48)", "(83, 48)")),
    *(
        (str(t), tensors(model__norm__weight=torch.ones(48).to(t)), (str(t).removeprefix("torch."), "f32, f16, bf16"))
        for t in UNREAD
    ),
]


@pytest.mark.parametrize(("prepare", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_wrong_is_named(folder: Path, prepare: Prepare, words: tuple[str, ...]) -> None:
    prepare(folder)
    message = refusal(folder)
    assert all(word in message for word in words), message


STRAY = {
    "shards beside a whole file": (
        "model.safetensors",
        "model-00001-of-00009.safetensors",
        "model.safetensors is read",
    ),
    "an older form": (None, "pytorch_model.bin", None),
    "its maker's form": (None, "consolidated.safetensors", None),
    "shards of another time": (None, "model-00010-of-00010.safetensors", "index.json is read"),
    "an adapter": (None, "adapter_config.json", "the adapter (PEFT) beside the weights is left out"),
}


@pytest.mark.parametrize("case", STRAY)
def test_weights_that_are_not_read_are_told(sharded: Path, tmp_path: Path, case: str) -> None:
    whole, stray, notice = STRAY[case]
    if whole:
        random_llama(tmp_path / "whole", tokenizer=False)
        shutil.copyfile(tmp_path / "whole" / whole, sharded / whole)
    (sharded / stray).write_bytes(b"{}")
    notices = open_checkpoint(sharded).notices
    assert [*notices] == [] if notice is None else len(notices) == 1 and notice in notices[0]


def test_an_index_that_names_what_the_shard_lacks(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    name = next(k for k, v in index["weight_map"].items() if v == first)
    edit_json(path, weight_map={**index["weight_map"], name: last})
    message = refusal(sharded)
    assert "not in the shard that the index names" in message
    assert name in message


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "other.bin", 3])
def test_an_index_that_points_elsewhere(sharded: Path, target: object) -> None:
    path = sharded / "model.safetensors.index.json"
    edit_json(path, weight_map={"model.norm.weight": target})
    assert "not an index" in refusal(sharded)


def test_safetensors_go_before_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert open_checkpoint(folder).source.files == ("model.safetensors",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_found_when_read(folder: Path, value: float) -> None:
    down = torch.zeros(48, 83)
    down[47, 80] = value
    edit_tensors(folder, model__layers__2__mlp__down_proj__weight=down)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.down_proj\.weight holds NaN"):
        checkpoint.values("layers/2/ffn/rest")


def test_a_hub_name_is_fetched_without_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fetch(name: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        assert not local_files_only
        calls.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    checkpoint = open_checkpoint("owner/name", revision="abc")
    assert (checkpoint.folder, checkpoint.revision) == (folder, folder.name)
    assert [call[:2] for call in calls] == [("owner/name", "abc")]
    assert not any("bin" in pattern or ".py" in pattern for pattern in calls[0][2])


def test_a_hub_name_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no snapshot in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert "the hub cannot be reached" in refusal("owner/name")


def test_a_hub_name_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object, **__: object) -> str:
        raise OSError("404")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert "check name and revision" in refusal("owner/name", revision="v9")


def test_the_digest_is_of_content(folder: Path) -> None:
    before = open_checkpoint(folder)
    assert set(before.file_digests) == {"config.json", "generation_config.json", "model.safetensors"}
    assert open_checkpoint(folder).digest() == before.digest()
    (folder / "README.md").write_text("not read")
    assert open_checkpoint(folder).digest() == before.digest()
    edit_json(folder / "config.json", use_cache=False)
    assert open_checkpoint(folder).digest() != before.digest()
