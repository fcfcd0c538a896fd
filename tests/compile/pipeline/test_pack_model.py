"""Packing a model that has no recipe, with the packages of the extra `pack` alone."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")

from support.commands import USAGE, child
from support.gguf_files import rounded_checkpoint, write_byte_tokenizer, write_gguf

from pi_compile.machine.doctor import EXTRAS
from pi_compile.pipeline.packed import pack_model, pack_plain
from pi_compile.pipeline.recipe_checkpoint import create_recipe
from pi_runtime import load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.console import progress
from pi_runtime.engine import loading
from pi_runtime.errors import DeviceError, UsageError

OTHERS = {name for extra, names in EXTRAS.items() if extra not in ("runtime", "pack") for name in names}
WITHOUT_OTHERS = f"""
    import sys
    from importlib.machinery import PathFinder
    class Hidden(PathFinder):
        '''Finds what the extra `pack` installs, and nothing that only other extras do.'''
        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name.partition(".")[0] not in {OTHERS - set(EXTRAS["pack"])}:
                return super().find_spec(name, path, target)
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model as a folder of safetensors and as GGUF files, of floats and of blocks of eight bits."""
    folder = tmp_path_factory.mktemp("models")
    rounded_checkpoint(folder / "small", "llama", "bf16")
    write_byte_tokenizer(folder / "small")
    for kind in ("bf16", "q8"):
        write_gguf(folder / "small", folder / f"{kind}.gguf", kind)
    return {"folder": folder / "small", "bf16": folder / "bf16.gguf", "q8": folder / "q8.gguf"}


def pack(model: Path, output: Path) -> None:
    pack_model(str(model), output, progress=progress, notice=lambda _line: None)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["folder", "bf16", "q8"])
def test_without_torch(models: dict[str, Path], form: str, tmp_path: Path) -> None:
    """The same bytes as with it."""
    process = child(WITHOUT_OTHERS, "pack", "--plain", models[form], "-o", tmp_path / "without.pi", "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert json.loads(out)["artifact"] == str(tmp_path / "without.pi")
    pack(models[form], tmp_path / "with.pi")
    assert (tmp_path / "without.pi").read_bytes() == (tmp_path / "with.pi").read_bytes()


@pytest.mark.slow
def test_a_missing_package_is_named_with_the_small_extra(models: dict[str, Path], tmp_path: Path) -> None:
    hidden = WITHOUT_OTHERS.replace("not in {", "not in {'gguf', ")
    process = child(hidden, "pack", "--plain", models["q8"], "-o", tmp_path / "a.pi")
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (USAGE, "")
    assert "gguf is not installed" in err
    assert "try: pip install '.[pack]'" in err


def test_it_is_packed_as_init_proposes(models: dict[str, Path], tmp_path: Path) -> None:
    create_recipe(str(models["q8"]), tmp_path / "r.toml")
    pack_plain(tmp_path / "r.toml", tmp_path / "by-recipe.pi", progress=progress, notice=lambda _line: None)
    pack(models["q8"], tmp_path / "without.pi")
    with Artifact.open(tmp_path / "by-recipe.pi") as one, Artifact.open(tmp_path / "without.pi") as other:
        assert one.manifest.formats == other.manifest.formats
        assert one.manifest.arrays == other.manifest.arrays
        assert {**one.manifest.recipe, "model": {}} == {**other.manifest.recipe, "model": {}}
        assert other.manifest.recipe["model"]["path"] == "q8.gguf"  # no path of this machine


@pytest.mark.parametrize("kind", ["bf16", "q8", "q4_1", "q5"])
def test_a_model_that_is_not_sparse_keeps_its_own_matrices(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a file has in blocks is taken bit for bit, `down` too, and logits are those of the model."""
    model = rounded_checkpoint(tmp_path / "dense", "llama", kind, hidden_act="silu")
    write_byte_tokenizer(tmp_path / "dense")
    write_gguf(tmp_path / "dense", tmp_path / "a.gguf", kind)
    notices: list[str] = []
    report = pack_model(str(tmp_path / "a.gguf"), tmp_path / "a.pi", progress=progress, notice=notices.append)
    assert all(row["largest_error"] == 0 for row in report.get("quantisation", []))
    with Artifact.open(tmp_path / "a.pi") as artifact:
        assert (artifact.manifest.ffn_layout, artifact.manifest.formats["ffn"]) == ("matrices", kind)
        assert "layers/0/ffn/down" in artifact.manifest.arrays
    import torch

    ids = torch.arange(3, 40)
    with torch.inference_mode(), load(tmp_path / "a.pi") as running:
        wanted, found = model(ids[None]).logits[0].numpy(), running.logits(ids.numpy())
    error = (found - wanted).std() / wanted.std()
    assert error < {"bf16": 2e-3, "q8": 0.05}.get(kind, 0.1)
    with pytest.raises(DeviceError, match="--layout neurons"):
        load(tmp_path / "a.pi", device="stand-in")
    monkeypatch.setattr(loading, "ram_budget_for", lambda _nbytes: 1 << 30)
    with load(tmp_path / "a.pi") as running:
        np.testing.assert_array_equal(running.logits(ids.numpy()), found)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are text")
def test_names_that_are_no_utf8(models: dict[str, Path], tmp_path: Path) -> None:
    file, folder = (Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff" + end)) for end in (b".gguf", b""))
    shutil.copy(models["q8"], file)
    shutil.copytree(models["folder"], folder)
    for path in (file, folder, folder / "model.safetensors"):
        with pytest.raises(UsageError, match=r"m\ufffd.*: its name is no UTF-8, .*\n  try: rename it"):
            pack(path, tmp_path / "a.pi")
    assert not (tmp_path / "a.pi").exists()
    shutil.copy(models["q8"], tmp_path / "mÿ.gguf")
    pack(tmp_path / "mÿ.gguf", tmp_path / "a.pi")


def test_a_layout_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    rounded_checkpoint(tmp_path / "sparse", "llama", "bf16", hidden_act="relu")
    write_byte_tokenizer(tmp_path / "sparse")
    with pytest.raises(UsageError, match="is for models that compute every neuron"):
        pack_model(str(tmp_path / "sparse"), tmp_path / "a.pi", layout="matrices", progress=progress, notice=print)
    for unknown in ("rows", "mixed"):  # what is mixed follows from rungs, which this has not
        with pytest.raises(UsageError, match=rf"{unknown}(.|\n)*expected: neurons, matrices"):
            pack_model(str(tmp_path / "sparse"), tmp_path / "a.pi", layout=unknown, progress=progress, notice=print)
    assert not (tmp_path / "a.pi").exists()
