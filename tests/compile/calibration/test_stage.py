"""Quantising a checkpoint: less is lost, by any number of workers in the same bytes, and after a kill."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import numpy.typing as npt
import torch
from support import families, hf

from pi_compile.calibration.quantising import QuantiseSpec, compensation, estimate, memory_bytes, quantise_weights
from pi_compile.calibration.quantising.compensation import FIRST, OUT, QKV, down, neuron_ranges, second_moments, sizes
from pi_compile.calibration.quantising.stage import _Run
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CorpusError, ProfileError
from pi_compile.results import QuantisedWeights
from pi_compile.torch_model import ResidentLayers
from pi_compile.torch_model import decoder as td
from pi_compile.workers import work_folder
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import as_stored, dequantise

MORE = pytest.mark.more
SPEC = QuantiseSpec(formats={"attention": "q4", "ffn": "q4"}, window=16, batch=2)
TOKENS = np.random.default_rng(0).integers(3, 130, 40 * 16 + 5)
NAMES = ("attention/qkv", "attention/out", "ffn/first", "ffn/rest")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("llama")
    hf.random_llama(folder, tokenizer=False)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("opt")
    hf.random_opt(folder, tokenizer=False)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def matrices(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model whose FFNs are whole matrices, of rows of whole groups."""
    folder = tmp_path_factory.mktemp("matrices")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "hidden_act": "silu"}
    hf.random_llama(folder, tokenizer=False, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **sizes)
    return open_checkpoint(folder).in_layout("matrices")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("mixtral")
    families.random_checkpoint(folder, "mixtral")
    return open_checkpoint(folder)


def quantised(
    checkpoint: Checkpoint, scratch: Path, spec: QuantiseSpec = SPEC, tokens: npt.NDArray[np.int64] = TOKENS
) -> QuantisedWeights:
    with work_folder(scratch) as work:
        return quantise_weights(checkpoint, tokens, spec, work=work, inputs="x", progress=lambda _done, _total: None)


def weights(
    checkpoint: Checkpoint, found: QuantisedWeights | None, names: Sequence[str] = NAMES, fmt: str = "q4"
) -> list[dict[str, torch.Tensor]]:
    """The layers with some matrices as they are stored: as found, or rounded to nearest."""
    layers = []
    for n, w in enumerate(td.stored_layers(checkpoint, "cpu")):
        rounded = {
            name: as_stored(fmt, w[name].numpy())
            if found is None
            else dequantise(FORMATS[fmt], *found[f"layers/{n}/{name}"], w[name].shape[-1])
            for name in names
        }
        layers.append({**w, **{name: torch.from_numpy(value) for name, value in rounded.items()}})
    return layers


def loss(checkpoint: Checkpoint, layers: list[dict[str, torch.Tensor]]) -> float:
    """Mean square of the change of the last states, on other text."""
    ids = td.windows(np.random.default_rng(1).integers(3, 130, 30 * 16), 16)
    x = td.embed(checkpoint.decoder, td.embedding_weights(checkpoint, "cpu"), ids)
    *_, (exact,) = td.layers(checkpoint.decoder, td.stored_layers(checkpoint, "cpu"), [x])
    *_, (after,) = td.layers(checkpoint.decoder, layers, [x])
    return float((after - exact).square().mean())


@pytest.mark.parametrize("family", ["llama", pytest.param("opt", marks=MORE), pytest.param("mixtral", marks=MORE)])
def test_the_states_change_less_than_rounded_to_nearest(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    checkpoint = request.getfixturevalue(family)
    found = quantised(checkpoint, tmp_path)
    assert list(found) == [f"layers/{n}/{name}" for n in range(checkpoint.decoder.n_layers) for name in NAMES]
    with torch.inference_mode():
        every = [loss(checkpoint, weights(checkpoint, one)) for one in (found, None)]
        # Queries, keys and values are not made good, so it shows best without them.
        others = [loss(checkpoint, weights(checkpoint, one, NAMES[1:])) for one in (found, None)]
    assert every[0] < every[1]
    assert others[0] < 0.9 * others[1]


@pytest.mark.parametrize("fmt", ["q4_1", "q4z"])
def test_with_an_offset_down_is_made_good_and_others_are_weighed(llama: Checkpoint, tmp_path: Path, fmt: str) -> None:
    found = quantised(llama, tmp_path, replace(SPEC, formats={"attention": fmt, "ffn": fmt}))
    with torch.inference_mode():
        every = [loss(llama, weights(llama, one, fmt=fmt)) for one in (found, None)]
        down = [loss(llama, weights(llama, one, NAMES[3:], fmt)) for one in (found, None)]
    assert every[0] < every[1]
    assert down[0] < down[1]


@pytest.mark.parametrize("fmt", ["q4", "q4_k", pytest.param("q6_k", marks=MORE), pytest.param("iq4_xs", marks=MORE)])
def test_whole_matrices_are_made_good_in_their_formats_too(matrices: Checkpoint, tmp_path: Path, fmt: str) -> None:
    tokens = np.random.default_rng(0).integers(3, 130, 300 * 16)  # of fewer, nothing is learnt about 256 neurons
    found = quantised(matrices, tmp_path, replace(SPEC, formats={"attention": fmt, "ffn": fmt}), tokens)
    names = ("attention/qkv", "attention/out", "ffn/first", "ffn/up", "ffn/down")
    assert sorted(found) == sorted(f"layers/{n}/{name}" for n in range(2) for name in names)
    with torch.inference_mode():
        every = [loss(matrices, weights(matrices, one, names, fmt)) for one in (found, None)]
        others = [loss(matrices, weights(matrices, one, names[1:], fmt)) for one in (found, None)]
        down = [loss(matrices, weights(matrices, one, names[-1:], fmt)) for one in (found, None)]
    assert every[0] < every[1]
    assert others[0] < 0.9 * others[1]
    assert down[0] < down[1]


def test_the_same_bytes_again_from_a_file_and_after_a_kill(llama: Checkpoint, tmp_path: Path) -> None:
    once = quantised(llama, tmp_path / "once")
    once.save(tmp_path / "once.npz")
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt), work_folder(folder) as work:
        _stopped_after(5, llama, work)
    quantised(llama, folder).save(tmp_path / "again.npz")
    assert (tmp_path / "once.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()
    loaded = QuantisedWeights.load(tmp_path / "once.npz")
    assert (loaded.inputs, list(loaded)) == ("x", list(once))
    for name in once:
        for mine, theirs in zip(once[name], loaded.in_memory()[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert not list(folder.glob("moments-*"))


def _stopped_after(tasks: int, checkpoint: Checkpoint, work: object) -> None:
    def progress(done: int, _total: int) -> None:
        if done >= tasks:
            raise KeyboardInterrupt

    quantise_weights(checkpoint, TOKENS, SPEC, work=work, inputs="x", progress=progress)  # type: ignore[arg-type]


def test_the_order_of_tasks_changes_nothing(llama: Checkpoint, tmp_path: Path) -> None:
    """Workers do tasks in any order that the needs allow, each with weights of its own."""
    quantised(llama, tmp_path / "first")
    folder = tmp_path / "last"
    folder.mkdir()
    done: set[str] = set()
    with torch.inference_mode():
        while True:
            run = _Run(llama, td.windows(TOKENS, 16), SPEC, folder, ResidentLayers(llama, "cpu"))
            ready = [name for name in run.tasks() if name not in done and done.issuperset(run.needs().get(name, ()))]
            if not ready:
                break
            run.tasks()[ready[-1]]()
            done.add(ready[-1])
    assert len(run.shards) > 2
    for n in run.layers:
        assert (folder / run.rounded(n)).read_bytes() == (tmp_path / "first" / run.rounded(n)).read_bytes()


def test_only_coarse_formats_are_rounded(llama: Checkpoint, tmp_path: Path) -> None:
    found = quantised(llama, tmp_path, replace(SPEC, formats={"attention": "q8", "ffn": "q4"}))
    assert {name.split("/", 2)[2] for name in found} == {"ffn/first", "ffn/rest"}
    with pytest.raises(KeyError):
        found["layers/0/attention/qkv"]


def test_text_shorter_than_a_window_and_damaged_files_are_refused(llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CorpusError), work_folder(tmp_path / "short") as work:
        quantise_weights(llama, TOKENS[:9], SPEC, work=work, inputs="", progress=lambda _done, _total: None)
    (tmp_path / "none.npz").write_bytes(b"PK nonsense")
    with pytest.raises(ProfileError):
        QuantisedWeights.load(tmp_path / "none.npz")


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_second_moments_are_those_of_the_inputs(family: str, request: pytest.FixtureRequest) -> None:
    """A matrix's outputs have the mean squares that its rows and the moment give."""
    checkpoint = request.getfixturevalue(family)
    d, w = checkpoint.decoder, next(iter(td.stored_layers(checkpoint, "cpu")))
    ids = td.windows(TOKENS, 16)[:4]
    with torch.inference_mode():
        x = td.embed(d, td.embedding_weights(checkpoint, "cpu"), ids)
        sums = second_moments(d, 0, w, torch.split(x, 3), lambda batch: batch)
        residual, inputs = td.before_ffn(d, w, x)
        h = td.neurons(d, w, inputs).flatten(0, 1)
        after = td.after_ffn(d, w, residual, td.ffn_output(w, td.neurons(d, w, inputs)))
    assert {name: len(moment) for name, moment in sums.items()} == sizes(d)
    flat = inputs.flatten(0, 1)
    torch.testing.assert_close(sums[FIRST], (flat.T @ flat).double(), rtol=1e-4, atol=1e-4)
    h = h / after.flatten(0, 1).square().mean(1, keepdim=True).sqrt()
    for n, part in enumerate(neuron_ranges(d)):
        own = h[:, part.start : part.stop]
        torch.testing.assert_close(sums[down(n)], (own.T @ own).double(), rtol=1e-4, atol=1e-4)
    assert all(float(sums[name].diagonal().min()) > 0 for name in (QKV, OUT, FIRST))


def test_neurons_are_kept_together_by_expert_and_within_a_bound(
    mixtral: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = mixtral.decoder
    assert neuron_ranges(d) == [range(e * d.d_ff, (e + 1) * d.d_ff) for e in range(d.n_experts)]
    monkeypatch.setattr(compensation, "MOST_NEURONS", d.d_ff // 3)
    parts = neuron_ranges(d)
    assert [i for part in parts for i in part] == list(range(d.neurons))
    assert max(map(len, parts)) <= d.d_ff // 3
    assert all(part.start // d.d_ff == (part.stop - 1) // d.d_ff for part in parts)


def test_memory_and_disk_are_announced(llama: Checkpoint) -> None:
    d = llama.decoder
    wide = replace(d, d_ff=4 * d.d_ff)
    assert memory_bytes(wide, SPEC) > memory_bytes(d, SPEC) > 450 << 20
    found = estimate(d, 4096, SPEC)
    assert found.seconds > 0
    assert found.memory_bytes == memory_bytes(d, SPEC)
    assert found.disk_bytes > 8 * 8 * d.d_ff**2
