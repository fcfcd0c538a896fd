"""Profiling counts what fires, the same in any groups and shards, and goes on after a kill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from support import hf
from transformers import PreTrainedModel

from pi_compile.calibration import profiling
from pi_compile.calibration.profiling import ProfileSpec, count_fired, count_persistent, estimate, profile
from pi_compile.checkpoint import Checkpoint, open_checkpoint
from pi_compile.errors import CorpusError, ProfileError, TaskFailedError
from pi_compile.files import read_arrays
from pi_compile.results.activation_profile import ActivationProfile
from pi_compile.torch_model import PROCESS_BYTES
from pi_compile.torch_model import decoder as td
from pi_compile.workers import work_folder

# 11 windows and a rest; shards of 4, 4 and 3 windows; batches of 3 and 1.
SPEC = ProfileSpec(window=16, batch=3, shard=4, cofiring_tokens=36)
TOKENS = np.random.default_rng(0).integers(3, 130, 11 * 16 + 5)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Checkpoint]:
    folder = tmp_path_factory.mktemp("llama")
    return hf.random_llama(folder, tokenizer=False, mlp_bias=True), open_checkpoint(folder)


@pytest.fixture(scope="module")
def opt(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Checkpoint]:
    folder = tmp_path_factory.mktemp("opt")
    return hf.random_opt(folder, tokenizer=False), open_checkpoint(folder)


def run(
    checkpoint: Checkpoint,
    scratch: Path,
    tokens: np.ndarray = TOKENS,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    **changes: Any,
) -> ActivationProfile:
    with work_folder(scratch) as work:
        return profile(checkpoint, tokens, replace(SPEC, **changes), work=work, inputs="inputs", progress=progress)


def preactivations(model: PreTrainedModel, windows: torch.Tensor) -> list[torch.Tensor]:
    """(tokens, F) of every layer, from hooks on transformers' own modules."""
    layers = model.model.layers if model.config.model_type == "llama" else model.model.decoder.layers
    firsts = [layer.mlp.gate_proj if model.config.model_type == "llama" else layer.fc1 for layer in layers]
    found: list[torch.Tensor] = []
    hooks = [m.register_forward_hook(lambda _m, _x, y: found.append(y.flatten(0, -2))) for m in firsts]
    with torch.inference_mode():
        model(windows)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_counts_are_a_plain_count(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model, checkpoint = request.getfixturevalue(family)
    found = run(checkpoint, tmp_path)
    assert (found.tokens, found.inputs, found.decoder) == (11 * 16, "inputs", checkpoint.decoder)
    z = torch.stack(preactivations(model, td.windows(TOKENS, 16))).numpy()
    # Which sign a value next to zero gets is a matter of the last bit.
    doubtful = (np.abs(z) < 1e-4).sum(1)
    assert doubtful.sum() < 1e-3 * z.size
    assert (np.abs(found.counts.astype(int) - (z > 0).sum(1)) <= doubtful).all()
    assert 0.2 < found.density().min() < found.density().max() < 0.8


def test_a_smooth_activation_fires_always(tmp_path: Path) -> None:
    hf.random_llama(tmp_path / "model", tokenizer=False, hidden_act="silu")
    found = run(open_checkpoint(tmp_path / "model"), tmp_path / "work")
    np.testing.assert_array_equal(found.density(), 1)
    np.testing.assert_array_equal(found.order, np.tile(np.arange(83), (3, 1)))


@pytest.mark.parametrize("layers_at_once", [1, 2, 3, 7])
def test_layer_by_layer_counts_the_same(llama: Any, tmp_path: Path, layers_at_once: int) -> None:
    whole = run(llama[1], tmp_path / "whole")
    parts = run(llama[1], tmp_path / "parts", layers_at_once=layers_at_once)
    np.testing.assert_array_equal(parts.counts, whole.counts)
    np.testing.assert_array_equal(parts.order, whole.order)
    assert parts.digest() == whole.digest()


def test_each_weight_is_read_once(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], td.layer_weights
    monkeypatch.setattr(td, "layer_weights", lambda c, n, device: read.append(n) or original(c, n, device))
    run(llama[1], tmp_path, layers_at_once=1)
    assert read == [0, 1, 2]


def test_hidden_states_take_the_disk_that_was_estimated(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TOKENS[: 11 * 16]
    for step, name in ((1, "layers"), (None, "whole")):
        taken, write = [0], profiling.write_arrays

        def measured(path: Path, arrays: Any) -> None:
            write(path, arrays)  # noqa: B023
            files = path.parent.glob("states-*.npz")
            taken.append(sum(read_arrays(file)["states"].nbytes for file in files))  # noqa: B023

        monkeypatch.setattr(profiling, "write_arrays", measured)
        run(llama[1], tmp_path / name, tokens, layers_at_once=step)
        monkeypatch.undo()
        estimated = estimate(llama[1].decoder, len(tokens), replace(SPEC, layers_at_once=step)).disk_bytes
        assert max(taken) == estimated
        assert not list((tmp_path / name).glob("states-*.npz"))


@pytest.mark.parametrize(
    ("layers_at_once", "finished"), [*((1, finished) for finished in range(1, 10, 2)), (None, 1), (None, 2), (None, 3)]
)
def test_a_killed_run_goes_on(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers_at_once: int | None, finished: int
) -> None:
    whole = run(llama[1], tmp_path / "whole", layers_at_once=layers_at_once)
    seen: list[tuple[int, int]] = []

    def stop_early(done: int, total: int) -> None:
        seen.append((done, total))
        if done >= finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llama[1], tmp_path / "killed", progress=stop_early, layers_at_once=layers_at_once)
    batches, original = [], td.neurons
    monkeypatch.setattr(td, "neurons", lambda *a: batches.append(a) or original(*a))
    again = run(llama[1], tmp_path / "killed", progress=lambda *a: seen.append(a), layers_at_once=layers_at_once)
    assert again.digest() == whole.digest()
    # Three shards: two with two batches, one with one; of each layer only what was missing.
    layers, total = (1, 9) if layers_at_once else (3, 3)
    assert sorted(set(seen)) == [(done, total) for done in range(total + 1)]
    assert len(batches) == layers * sum([2, 2, 1][n % 3] for n in range(finished, total))


@pytest.mark.parametrize("batch", range(1, 15, 3))
def test_a_kill_in_the_middle_of_a_shard(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    whole = run(llama[1], tmp_path / "whole", layers_at_once=1)
    calls, original = [], td.ffn_output

    def dies(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == batch:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(td, "ffn_output", dies)
    with pytest.raises(KeyboardInterrupt):
        run(llama[1], tmp_path / "killed", layers_at_once=1)
    assert run(llama[1], tmp_path / "killed", layers_at_once=1).digest() == whole.digest()


def test_a_missing_shard_of_the_last_layers_is_made_again(llama: Any, tmp_path: Path) -> None:
    whole = run(llama[1], tmp_path, layers_at_once=2)
    for name in ("layers-2.npz", "layers-2-shard-1.npz"):
        (tmp_path / name).unlink()
    with pytest.raises(TaskFailedError, match="states-2-shard-1"):  # they are kept only as long as they are needed
        run(llama[1], tmp_path, layers_at_once=2)
    for path in tmp_path.glob("layers-*.npz"):
        path.unlink()
    assert run(llama[1], tmp_path, layers_at_once=2).digest() == whole.digest()


def test_a_damaged_shard_is_refused(llama: Any, tmp_path: Path) -> None:
    run(llama[1], tmp_path)
    (tmp_path / "layers-0.npz").unlink()
    file = tmp_path / "layers-0-shard-1.npz"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ProfileError, match="remove it and make it again"):
        run(llama[1], tmp_path)


@pytest.mark.parametrize("changes", [{"batch": 1}, {"batch": 64}, {"shard": 1}, {"shard": 100}], ids=str)
def test_portions_do_not_change_what_is_sampled(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    model, checkpoint = llama
    sampled: list[np.ndarray] = []
    original = profiling.order_neurons
    monkeypatch.setattr(profiling, "order_neurons", lambda c, bits, x: sampled.append(bits) or original(c, bits, x))
    run(checkpoint, tmp_path, **changes)
    z = torch.stack(preactivations(model, td.windows(TOKENS, 16))).numpy()[:, ::5]  # 176 tokens, at most 36
    found = np.stack(sampled)
    assert found.shape == z.shape == (3, 36, 83)
    assert ((found == 1) == (z > 0))[np.abs(z) > 1e-4].all()


def test_without_a_sample_neurons_are_ordered_by_count(llama: Any, tmp_path: Path) -> None:
    found = run(llama[1], tmp_path, cofiring_tokens=0)
    assert (np.diff(found.ordered_counts().astype(int), axis=1) <= 0).all()


def test_a_text_shorter_than_one_window(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"the text has 15 tokens\n  expected: at least one window of 16") as caught:
        run(llama[1], tmp_path, TOKENS[:15])
    assert caught.value.exit_code == 3


def test_windows_are_no_longer_than_the_context(llama: Any, tmp_path: Path) -> None:
    assert run(llama[1], tmp_path, window=10**6).tokens == len(TOKENS) // 64 * 64


@pytest.mark.parametrize("tokens", [1, 254, 255, 256, 700])
def test_bytes_do_not_overflow(tokens: int) -> None:
    fired = torch.ones(tokens, 3, dtype=torch.bool)
    fired[:, 1] = False
    assert count_fired(fired).tolist() == [tokens, 0, tokens]


@pytest.mark.parametrize("tokens", [0, 5, 8, 9, 40])
def test_persistence_is_a_plain_count(tokens: int) -> None:
    """At tokens with eight before them: what fires, and what of it fired in one of the last 1, 2, 4, 8 tokens."""
    rng = np.random.default_rng(tokens)
    fired = rng.random((3, tokens, 50)) < 0.2
    expected = [0] * 5
    for sequence in fired:
        for t in range(8, tokens):
            expected[0] += int(sequence[t].sum())
            for n, window in enumerate((1, 2, 4, 8)):
                expected[n + 1] += int((sequence[t] & sequence[t - window : t].any(0)).sum())
    assert count_persistent(torch.from_numpy(fired)).tolist() == expected


def test_persistence_is_the_same_in_any_groups_and_shards(llama: Any, tmp_path: Path) -> None:
    _, checkpoint = llama
    found = [
        run(checkpoint, tmp_path / f"{n}", **changes).persistence
        for n, changes in enumerate(({}, {"layers_at_once": 1}, {"shard": 1}, {"shard": 11, "batch": 3}))
    ]
    assert found[0] is not None
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    active, *persisted = found[0].T
    assert (active > 0).all()
    assert (np.diff([*persisted, active], axis=0) >= 0).all()
    assert run(checkpoint, tmp_path / "short", window=8).persistence is None


def test_an_estimate_grows_with_what_is_asked(llama: Any) -> None:
    d = replace(llama[1].decoder, d_model=512, d_ff=2048, n_layers=8, vocab_size=1000, context_length=512)
    spec = ProfileSpec()
    whole, layers = estimate(d, 10**6, spec), estimate(d, 10**6, replace(spec, layers_at_once=1))
    assert whole.seconds > 0
    weights = 4 * 8 * (3 * 512 * 2048 + (2 * d.n_heads + 2 * d.n_kv_heads) * d.head_dim * 512)
    assert weights < whole.memory_bytes - PROCESS_BYTES < 4 * weights
    states = 4 * spec.shard * spec.window * 512
    assert whole.memory_bytes - layers.memory_bytes == weights * 7 // 8 - states
    assert (whole.disk_bytes, layers.disk_bytes) == (0, (10**6 + spec.shard * spec.window) * 512 * 4)
    assert estimate(replace(d, ffn="plain"), 10**6, spec).memory_bytes < whole.memory_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_nearly_the_same(llama: Any, tmp_path: Path) -> None:
    cpu = run(llama[1], tmp_path / "cpu").counts.astype(int)
    gpu = run(llama[1], tmp_path / "gpu", device="cuda:0", layers_at_once=1).counts.astype(int)
    assert np.abs(cpu - gpu).sum() < 1e-3 * cpu.sum()


@pytest.mark.parametrize(("dense_from", "says_so"), [(0.0, True), (1.0, False)])
def test_a_sample_tells_whether_profiling_gains(
    llama: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dense_from: float, says_so: bool
) -> None:
    monkeypatch.setattr(profiling, "DENSE_FROM", dense_from)
    counted = run(llama[1], tmp_path, TOKENS[:64])
    line = profiling.sampled_density(llama[1], TOKENS, SPEC, seconds=10.0)
    assert line.startswith(f"on 64 tokens {counted.density().mean():.0%} of the neurons fire")
    assert ("pi-compile pack --plain" in line) == says_so
    # What takes long is sampled by one window.
    assert profiling.sampled_density(llama[1], TOKENS, SPEC, seconds=1e6).startswith("on 16 tokens ")
