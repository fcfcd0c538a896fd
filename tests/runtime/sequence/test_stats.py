"""The figures of a generation: counted as the definition counts, and sane where nothing was timed."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pi_runtime import Model, load
from pi_runtime.artifact.reader import Artifact
from pi_runtime.kernels import reference
from pi_runtime.sequence import answer as answering
from pi_runtime.sequence import sequence


def test_figures_before_and_after(loop: Model) -> None:
    answer = loop.generate("aa")
    before = answer.stats
    assert (before.prompt_tokens, before.generated_tokens, before.prefill_tokens_per_s) == (2, 0, None)
    "".join(answer)
    s = answer.stats
    assert (s.prompt_tokens, s.cached_tokens, s.generated_tokens) == (2, 0, 7)
    assert s.first_token_s >= s.prefill_s > 0
    assert s.decode_s > 0
    assert s.prefill_tokens_per_s == 2 / s.prefill_s
    assert s.decode_tokens_per_s == 6 / s.decode_s


def test_one_token_has_no_decoding_speed(loop: Model) -> None:
    answer = loop.generate("a", max_tokens=1)
    "".join(answer)
    s = answer.stats
    assert (s.decode_s, s.decode_tokens_per_s, s.rows_read_share, s.active_share) == (0, None, None, None)


def test_time_before_the_first_piece_is_asked_for_is_not_prefill(loop: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    for module in (answering, sequence):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    answer = loop.generate("a")
    for _ in range(100):
        next(clock)
    next(answer)
    assert (answer.stats.prefill_s, answer.stats.first_token_s) == (1, 102)


def counted(path: Path, ids: list[int], prefilled: int, mode: str) -> tuple[float, float]:
    """Shares of rows read and of neurons kept over ids[prefilled:], by the definition; the ids before run dense."""
    with Artifact.open(path) as artifact:
        d = artifact.manifest.decoder
        x_TD = artifact.values("embedding")[ids]
        read = kept = 0
        for n, layer in enumerate(artifact.manifest.layers):
            w = reference.ArtifactWeights(artifact, f"layers/{n}/")
            x_TD = x_TD + reference.attention(d, w, reference.norm(d, w, "attention/norm", x_TD))
            normed_TD = reference.norm(d, w, "ffn/norm", x_TD)
            active_TF = np.ones((len(ids), d.d_ff), bool)
            if mode == "predicted" and layer.rung == "predicted":
                active_TF[prefilled:] = reference.scores(w, normed_TD)[prefilled:] > 0
            fires_TF = active_TF & ((normed_TD @ w["ffn/first"].T > 0) | (mode == "dense"))
            read, kept = read + active_TF[prefilled:].sum(), kept + fires_TF[prefilled:].sum()
            x_TD = x_TD + reference.ffn(d, w, normed_TD, active_TF)
    neurons = d.d_ff * d.n_layers * (len(ids) - prefilled)
    return read / neurons, kept / neurons


@pytest.mark.parametrize("mode", ["dense", "gate", "predicted", "auto"])
def test_shares_are_those_counted_by_the_definition(random_path: Path, mode: str) -> None:
    prompt = [5, 80, 17]
    with load(random_path, mode=mode) as model:
        answer = model.generate(prompt, max_tokens=25)
        "".join(answer)
    ran = prompt + answer.token_ids[:-1]
    wanted = counted(random_path, ran, len(prompt), "predicted" if mode == "auto" else mode)
    s = answer.stats
    assert s.rows_read_share is not None
    assert s.active_share is not None
    np.testing.assert_allclose((s.rows_read_share, s.active_share), wanted, rtol=1e-12)
    assert {"dense": s.active_share == 1, "gate": s.active_share < s.rows_read_share == 1}.get(
        mode, s.rows_read_share < 1
    )
