"""What users get wrong about a checkpoint: each with its message and exit code, before any long work."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from support.hf import edit_json, edit_tensors, random_llama

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


def refusal(model: str | Path, **arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model, **arguments)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_no_such_folder(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nothing")
    assert "no such folder" in message
    assert "config.json" in message


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "no config.json" in (message := refusal(tmp_path))
    assert "an empty folder" in message


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    assert f"name the folder: {folder}" in refusal(folder / "model.safetensors")


def test_an_adapter_instead_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge it into its base model" in refusal(tmp_path)


def test_a_revision_for_a_local_folder(folder: Path) -> None:
    assert "revision 'main' is given for a local folder" in refusal(folder, revision="main")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_broken_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json: " in refusal(folder)


def test_an_unsupported_family(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="mamba")
    message = refusal(folder)
    assert "model type 'mamba' is not supported" in message
    assert "gpt2, gpt_oss, granite, granitemoe, llama, mistral" in message


def test_a_classifier_of_a_known_family(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "LlamaForCausalLM" in refusal(folder)


def test_auto_map_with_an_adapter_is_a_notice(folder: Path) -> None:
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert "never run" in open_checkpoint(folder).notices[0]


def test_auto_map_without_an_adapter_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    assert "its own code (auto_map), which is never run" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.h5")
    message = refusal(folder)
    assert "no weights" in message
    assert "weights.h5" in message


@pytest.mark.parametrize("keep", [0, 7, 1000, 0.5, 0.999])
def test_truncated_weights(folder: Path, keep: float) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    assert "model.safetensors: not a whole safetensors file" in refusal(folder)


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "git lfs pull" in refusal(folder)


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.unlink()
    message = refusal(sharded)
    assert "1 of " in message
    assert shard.name in message


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


def test_a_pickle_with_more_than_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weights": torch.nn.Linear(2, 2)}, folder / "pytorch_model.bin")
    assert "a pickle's code is never run" in refusal(folder)


def test_safetensors_go_before_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    assert open_checkpoint(folder).source.files == ("model.safetensors",)


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_truncated_pickle(tmp_path: Path, keep: float) -> None:
    random_llama(tmp_path, tokenizer=False, pickled=True)
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    assert "pytorch_model.bin: not a whole torch file" in refusal(tmp_path)


def test_a_pickle_that_is_no_state_dict(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    assert "not a state dict" in refusal(folder)


def test_missing_tensors_are_listed(folder: Path) -> None:
    edit_tensors(folder, "model.norm.weight", "model.layers.1.mlp.up_proj.weight")
    message = refusal(folder)
    assert "2 tensors that config.json calls for are missing" in message
    assert "model.layers.1.mlp.up_proj.weight" in message


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.bias", "score"])
def test_tensors_with_a_function_nobody_asked_for(folder: Path, name: str) -> None:
    edit_tensors(folder, **{name: torch.ones(10)})
    message = refusal(folder)
    assert "1 tensors that config.json does not account for" in message
    assert name in message


def test_a_config_that_lies_about_shapes(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=84)
    message = refusal(folder)
    assert "9 tensors do not have the shape" in message
    assert "(84, 48)" in message
    assert "(83, 48)" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_number_format_that_is_not_read(folder: Path, dtype: Any) -> None:
    edit_tensors(folder, model__norm__weight=torch.ones(48).to(dtype))
    message = refusal(folder)
    assert str(dtype).removeprefix("torch.") in message
    assert "f32, f16, bf16" in message


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
