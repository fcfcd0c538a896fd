"""Formats of matrices within a budget: the best there are, in the file that is packed, or refused."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.numpy
from support import hf
from support.small_project import no_progress, small_project, small_recipe

from pi_compile.checkpoint import open_checkpoint
from pi_compile.errors import RecipeError
from pi_compile.pipeline.division import Option, _fewest_bytes, _least_divergence, divide
from pi_compile.pipeline.packed import pack_plain
from pi_compile.pipeline.pipeline import Pipeline
from pi_compile.pipeline.stages import pack
from pi_compile.recipe import default_recipe, read_recipe
from pi_compile.results import Division
from pi_compile.results.predictor_set import store_folder
from pi_runtime import load
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import as_stored, quantise
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import BY_NEURON, WHOLE, scales_name
from pi_runtime.errors import NotMetError

WIDEST = {"embedding": "q8", "attention": "q8", "ffn": "q8", "head": "q8"}


def test_divisions_are_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        options = {}
        for key in "abcd":
            sizes = np.sort(rng.choice(90, 3, replace=False)) + 1
            costs = np.sort(rng.choice(10**6, 3, replace=False))[::-1]
            options[key] = [Option(f"{key}{n}", int(sizes[n]), int(costs[n])) for n in range(3)]
        every = [(sum(o.nbytes for o in chosen), sum(o.cost for o in chosen)) for chosen in product(*options.values())]
        budget = int(rng.integers(min(n for n, _ in every), max(n for n, _ in every)))
        taken = _least_divergence(options, budget).values()
        assert sum(o.nbytes for o in taken) <= budget
        assert sum(o.cost for o in taken) == min(cost for n, cost in every if n <= budget)
        limit = int(rng.integers(min(c for _, c in every), max(c for _, c in every)))
        taken = _fewest_bytes(options, limit).values()
        assert sum(o.cost for o in taken) <= limit
        assert sum(o.nbytes for o in taken) == min(n for n, cost in every if cost <= limit)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    small_project(tmp_path)
    hf.random_llama(tmp_path / "model", hidden_size=192, intermediate_size=384, num_hidden_layers=2)
    return tmp_path


@pytest.mark.parametrize("layout", [BY_NEURON, WHOLE])
def test_scales_of_groups_are_options_where_rows_are_whole(tmp_path: Path, layout: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "hidden_act": "silu"}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    hf.random_llama(tmp_path, **sizes)
    checkpoint, tokens = open_checkpoint(tmp_path).in_layout(layout), np.arange(64) % 90 + 3

    def divided(mib: float) -> Division:
        return divide(checkpoint, tokens, formats=WIDEST, file_mib=mib, window=32)

    narrow = divide(checkpoint, tokens, formats=WIDEST, perplexity_increase=1.0, window=32)
    found = divided(narrow.nbytes * 1.1 / 2**20)
    grouped = {name for name, fmt in found.formats.items() if "/" in name and FORMATS[fmt].grouped}
    assert bool(grouped) == (layout == WHOLE)
    assert not any(name.endswith("ffn/down") for name in grouped)  # 384 columns are no whole groups
    path = pack(checkpoint, tmp_path / "a.pi", formats=found.formats).path
    assert path.stat().st_size <= found.nbytes
    with Artifact.open(path) as artifact:
        assert {name: artifact.manifest.formats[name] for name in grouped} == {n: found.formats[n] for n in grouped}


def limit(project: Path) -> float:
    """A budget of perplexity that is half of what the narrowest formats cost."""
    tokens = np.arange(64) % 90 + 3
    found = divide(open_checkpoint(project / "model"), tokens, formats=WIDEST, perplexity_increase=1.0, window=32)
    return math.expm1(found.divergence / 2)


def write(project: Path, **bits: float) -> Path:
    bits = {"file_mib": 0.0, "perplexity_increase": 0.0, "tokens": 64, **bits}
    recipe = small_recipe(pack=WIDEST, quality={"rounding_increase": 1.0}, bits=bits)
    (project / "r.toml").write_text(recipe.to_toml())
    return project / "r.toml"


def packed(project: Path, **bits: float) -> tuple[int, dict[str, str]]:
    """Bytes of the file, and formats of its manifest."""
    path = project / "a.pi"
    pack_plain(write(project, **bits), path, progress=no_progress, notice=lambda _line: None)
    with Artifact.open(path) as artifact:
        named = dict(artifact.manifest.formats)
    assert named.pop("predictor") == "q8"
    return path.stat().st_size, named


def test_a_file_has_at_most_the_bytes_of_the_budget(project: Path) -> None:
    whole, formats = packed(project, file_mib=100.0)
    assert formats == WIDEST
    sizes = [whole]
    for share in (0.9, 0.8):
        budget = share * whole / 2**20
        nbytes, formats = packed(project, file_mib=budget)
        assert nbytes <= budget * 2**20
        assert len(set(formats.values())) > 1
        sizes.append(nbytes)
    assert sizes == sorted(sizes, reverse=True)
    with load(project / "a.pi") as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


def test_a_budget_of_perplexity_takes_fewer_bytes_the_larger_it_is(project: Path) -> None:
    least, narrow = packed(project, perplexity_increase=1.0)
    some, mixed = packed(project, perplexity_increase=limit(project))
    assert least < some
    assert "q8" not in (narrow["ffn"], narrow["embedding"])
    assert len(set(mixed.values())) > 1


def test_a_build_divides_once_and_rounds_by_matrix(project: Path) -> None:
    path = write(project, perplexity_increase=limit(project))
    path.write_text(path.read_text() + "\n[quantise]\ntokens = 128\n")
    for ran in ({"divide", "quantise", "pack"}, set()):
        pipeline = Pipeline(path, "cpu", lambda _line: None, no_progress)
        pipeline.pack(project / "built.pi")
        assert ran <= set(pipeline.ran)
        assert bool(pipeline.ran) == bool(ran)
    with Artifact.open(project / "built.pi") as artifact:
        named = {name: fmt for name, fmt in artifact.manifest.formats.items() if "/" in name}
        assert named
        assert all(artifact.manifest.arrays[name].format == fmt for name, fmt in named.items())
        assert "formats.matrices" in artifact.manifest.features
    stored = Division.load(next(store_folder(path).glob("divide-*.npz")))
    assert named == {name: fmt for name, fmt in stored.formats.items() if "/" in name}


@pytest.mark.parametrize("road", ["build", "plain"])
def test_matrices_are_rounded_as_the_division_weighs_them(
    project: Path, road: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose cost was that of scales by the weighted error."""
    path, output, divided = write(project, perplexity_increase=1.0), project / "a.pi", list[Division]()

    def recorded(*args: Any, **settings: Any) -> Division:
        divided.append(divide(*args, **settings))
        return divided[-1]

    monkeypatch.setattr(f"pi_compile.pipeline.{'pipeline' if road == 'build' else 'division'}.divide", recorded)
    if road == "build":
        Pipeline(path, "cpu", lambda _line: None, no_progress).pack(output)
    else:
        pack_plain(path, output, progress=no_progress, notice=lambda _line: None)
    (found,), checkpoint = divided, open_checkpoint(project / "model")
    with Artifact.open(output) as artifact:
        for name in ("embedding", "layers/0/attention/qkv", "layers/1/attention/out"):
            fmt, values = FORMATS[artifact.manifest.arrays[name].format], checkpoint.values(name)
            stored = artifact.array(name), artifact.array(scales_name(name))
            for mine, expected in zip(stored, quantise(fmt, values, found.importance[name][0]), strict=True):
                np.testing.assert_array_equal(mine, expected)
            assert not np.array_equal(stored[0], quantise(fmt, values)[0])


def test_what_lies_on_a_grid_with_minima_keeps_it(project: Path) -> None:
    """As the tensors of a Q4_1 file do: they cost nothing in that format, in fewer bytes than in q8."""
    (path,) = (project / "model").glob("*.safetensors")
    tensors = safetensors.numpy.load_file(path)
    for name, w in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
            tensors[name] = as_stored("q4_1", w.astype(np.float32) + np.float32(0.3))
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    checkpoint = open_checkpoint(project / "model")
    found = divide(checkpoint, np.arange(64) % 90 + 3, formats=WIDEST, perplexity_increase=0.02, window=32)
    assert {found.formats.get(f"layers/0/{name}") for name in ("attention/qkv", "ffn/first")} == {"q4_1"}


@pytest.mark.parametrize(
    ("bits", "told"),
    [({"file_mib": 0.001}, "a larger [bits] file_mib"), ({"perplexity_increase": 1e-9}, "wider formats in [pack]")],
)
def test_a_budget_that_cannot_be_kept_is_refused(project: Path, bits: dict[str, float], told: str) -> None:
    with pytest.raises(NotMetError) as caught:
        packed(project, **bits)
    assert told in str(caught.value)


def test_the_table_may_be_missing_and_has_one_budget(project: Path) -> None:
    assert "[bits]" not in default_recipe("m").to_toml()
    path = write(project, file_mib=1.0)
    assert read_recipe(path).bits.file_mib == 1
    path.write_text(path.read_text().replace("perplexity_increase = 0.0\n", "perplexity_increase = 0.5\n"))
    with pytest.raises(RecipeError, match="one of file_mib and perplexity_increase"):
        read_recipe(path)
