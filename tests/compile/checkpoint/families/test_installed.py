"""A family that an installed package brings: found by its entry point, read like ours, and never stale in the store."""

import importlib
import json
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.torch import load_file, save_file
from support.commands import assert_a_message
from support.hf import edit_json, random_llama

from pi_compile.checkpoint import open_checkpoint
from pi_compile.checkpoint.families import family_names, registry
from pi_compile.errors import CheckpointError
from pi_compile.pipeline.store import code_digest

FAMILY = """
from pi_compile.checkpoint.families import Adapter, Config, SourceTensor, stored
from pi_runtime.artifact.decoder import Decoder

def decoder(config: Config) -> Decoder:
    width, heads = config.size("width"), config.size("heads")
    size = width // heads
    return Decoder(
        family="tiny", vocab_size=config.size("words"), d_model=width, d_embedding=width,
        n_layers=config.size("depth"), n_heads=heads, n_kv_heads=heads, head_dim=size, d_ff=config.size("inner"),
        context_length=config.size("length"), norm="rms", norm_eps=1e-6, positions="rope",
        rotary_frequencies=tuple(1e4 ** (-2 * j / size) for j in range(size // 2)), ffn="gated", activation="relu",
        tied_head=False, qkv_bias=False, out_bias=False, ffn_bias=False,
    )

LAYER = {
    "attention/norm/weight": stored("blocks.{n}.norm1"),
    "attention/qkv": stored(*(f"blocks.{{n}}.{p}" for p in "qkv")),
    "attention/out": stored("blocks.{n}.o"),
    "ffn/norm/weight": stored("blocks.{n}.norm2"),
    "ffn/first": stored("blocks.{n}.gate"),
    "ffn/rest": (SourceTensor("blocks.{n}.up"), SourceTensor("blocks.{n}.down", transposed=True)),
}
ADAPTER = Adapter(
    family="tiny", architectures=("TinyForCausalLM",), prefixes=("tiny.",),
    global_tensors={"embedding": stored("words"), "final_norm/weight": stored("norm")}, layer_tensors=lambda _: LAYER,
    read_keys=frozenset("words width depth heads inner length".split()), decoder=decoder,
)
"""
NAMES = {
    "model.embed_tokens.weight": "tiny.words",
    "model.norm.weight": "tiny.norm",
    "input_layernorm.weight": "norm1",
    "post_attention_layernorm.weight": "norm2",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
    "model.layers.": "tiny.blocks.",
}
SHAPE = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}


def install(site: Path, *, source: str = FAMILY, version: str = "1.0", name: str = "ADAPTER") -> None:
    """The files that `pip install` would leave in a site-packages folder."""
    package, info = site / "tiny_family", site / "tiny_family.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "family.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-family\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\ntiny = tiny_family.family:{name}\n")
    forget()


def forget() -> None:
    """What a new process would not know."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tiny_family"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    registry.adapters.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    forget()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Llama's weights under the foreign family's names."""
    folder = tmp_path / "model"
    random_llama(folder, **SHAPE)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[reduce(lambda n, pair: n.replace(*pair), NAMES.items(), name)] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"words": 131, "width": 30, "depth": 3, "heads": 3, "inner": 83, "length": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "dtype": "float32", **sizes}))
    return folder


def test_a_foreign_family_is_read_like_ours(site: Path, tiny: Path, tmp_path: Path) -> None:
    forget()
    with pytest.raises(CheckpointError, match="'tiny' is not supported"):
        open_checkpoint(tiny)
    install(site)
    random_llama(tmp_path / "llama", **SHAPE)
    found, expected = open_checkpoint(tiny), open_checkpoint(tmp_path / "llama")
    assert "tiny" in family_names()
    assert found.array_shapes == expected.array_shapes
    for name in expected.array_shapes:
        np.testing.assert_array_equal(found.values(name), expected.values(name))


def test_its_unknown_keys_are_refused_too(site: Path, tiny: Path) -> None:
    install(site)
    edit_json(tiny / "config.json", soft_cap=30.0)
    with pytest.raises(CheckpointError, match="soft_cap"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"source": "import nothing_that_is_there"}, "nothing_that_is_there"),
        ({"source": "ADAPTER = 3"}, "int"),
        ({"name": "OTHER"}, "OTHER"),
        ({"source": FAMILY.replace('family="tiny", arch', 'family="llama", arch')}, "'llama', which another family"),
    ],
    ids=["import", "kind", "name", "clash"],
)
def test_one_that_cannot_be_used_is_named(site: Path, tiny: Path, change: dict[str, str], found: str) -> None:
    install(site, **change)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tiny)
    assert found in str(error.value)
    assert "uninstall tiny-family" in str(error.value)
    assert_a_message(f"error: {error.value}")


@pytest.mark.parametrize(
    "stage", ["pi_compile.calibration.profiling", "pi_compile.training.stage", "pi_compile.packing"]
)
def test_results_depend_on_its_files_and_version(site: Path, stage: str) -> None:
    forget()
    seen = {code_digest(stage)}
    install(site)
    seen.add(code_digest(stage))
    install(site, source=FAMILY + "# a byte more")
    seen.add(code_digest(stage))
    install(site, version="1.1")
    seen.add(code_digest(stage))
    assert len(seen) == 4
    install(site, version="1.1")
    assert code_digest(stage) in seen
