"""Evaluate: how faithful a packed artifact is, measured with the runtime itself.

Every mode runs every token, with its selection at every position. The neurons that fire and those that are read are
counted on the same inputs. Speed is that of decoding token by token. Shape letters: N windows, L layers.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.checkpoint import Checkpoint
from pi_compile.errors import CorpusError
from pi_compile.evaluation.reference import check_origin, reference_logits
from pi_compile.evaluation.window_scores import Examine, Interval, Run, Score, Windows, increase_interval, score_windows
from pi_runtime import Model, load
from pi_runtime.artifact.inspection import other_bytes
from pi_runtime.artifact.rungs import RUNGS
from pi_runtime.artifact.schema import Manifest
from pi_runtime.errors import Setting, read_error, size
from pi_runtime.files import CHARACTERS, TEXT, shown_files


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `pi_runtime.load`; on the CPU by default."""

    device: str = "cpu"
    vram_budget: int | None = None
    """Bytes of GPU memory; None for what is free."""
    context: int | None = None
    """Positions of the cache; None for what the caller needs."""
    cache_format: str = "auto"
    """How keys and values are held."""
    threads: int | None = None
    tell: Callable[[str], object] = lambda _line: None
    """Is called with a line that names the placement in use, or says why the GPU is not used."""

    def open(self, artifact: Path, mode: str, context: int | None = None) -> Model:
        """Open the artifact; `context` is used if the options have none. Raises what `load` does."""
        opened = load(
            artifact,
            mode=mode,
            context=context if self.context is None else self.context,
            threads=self.threads,
            device=self.device,
            vram_budget=self.vram_budget,
            cache_format=self.cache_format,
        )
        if opened.notice is not None:
            self.tell(opened.notice)
        if opened.plan is not None:
            self.tell(f"{opened.device}: by the placement for {size(opened.plan.vram_bytes)} of GPU memory")
        return opened

    def open_on_cpu(self, artifact: Path) -> Model:
        """Open the artifact to read its manifest, tokenizer and context; the GPU is not used."""
        return load(artifact, context=self.context, threads=self.threads, device="cpu")


ON_CPU = LoadOptions()


def device_of(opened: Model) -> dict[str, object]:
    """The device that a model runs on, and the budget that its placement was solved for."""
    return {"device": opened.device, "vram_bytes": None if opened.plan is None else opened.plan.vram_bytes}


Progress = Callable[[int, int], None]
TIMED, TIMED_SECONDS, LEAST_TIMED = 256, 10.0, 8
"""Tokens decoded one by one to time them; fewer where that takes more than so many seconds, but at least so many."""


def evaluate(
    artifact: Path | str,
    texts: Sequence[Path | str],
    model: Path | None = None,
    *,
    tokens: int = 16_384,
    window: int = 512,
    progress: Progress = lambda _done, _total: None,
    options: LoadOptions = ON_CPU,
) -> dict[str, Any]:
    """Perplexity, top-1 agreement, divergence, bytes per token, tokens/s of each mode, and one row for each layer.

    `model` is the checkpoint that the artifact was packed from, scored in float32: a folder by transformers. `dense` is
    compared with it, the other modes with `dense`: their agreement, and the 95 % interval of the relative increase of
    perplexity. Divergence is that of every mode from the checkpoint, or from `dense` where there is none. Where keys
    and values are held in a format that was asked for, `dense` is also compared with itself in the usual one. Raises
    CorpusError for a text shorter than one window, CheckpointError for a checkpoint that the artifact was not packed
    from.

    `texts` are files or folders of text; at most their first `tokens` tokens are scored, in sequences of `window`.
    `docs/reference/output.md` names the keys of the result, which are those of `pi-compile eval --json`.

    >>> found = evaluate("demo.pi", ["docs/explanation/pipeline.md"], tokens=256, window=128)
    >>> abs(found["perplexity"]["gate"] / found["perplexity"]["dense"] - 1) < 1e-5
    True
    """
    artifact = Path(artifact)
    with options.open_on_cpu(artifact) as opened:
        manifest, windows = opened.manifest, _windows(opened, texts, tokens, window)
    origin = None if model is None else check_origin(manifest, model)
    modes, same = modes_of(manifest), same_as(manifest)
    computed = [mode for mode in modes if mode not in same]
    # On the CPU gate gives the bits of dense, and counts the same: what each reads of it follows from the mode.
    scored = {"gate": "dense"} if options.device == "cpu" else same
    runs = _runs(options, artifact, [mode for mode in modes if mode not in scored], origin)
    with runs[modes[0]]() as examine:
        examine(windows[0][:2])  # compiles, so that the time of the first window is that of the others
    progress(0, len(runs) * len(windows))
    scores = score_windows(windows, runs, manifest.decoder.vocab_size, counted(progress, len(runs) * len(windows)))
    device, speeds = _timed(options, artifact, computed, windows.reshape(-1)[:TIMED])
    checkpoint, usual = scores.pop("checkpoint", None), scores.pop("usual cache", None)
    scores = {mode: scores[scored.get(mode, mode)] for mode in modes}
    speeds = {mode: speeds[same.get(mode, mode)] for mode in modes}
    cache = {} if usual is None else {"cache": _cache_row(options.cache_format, scores["dense"], usual)}
    ffn = {mode: score.ffn_bytes(manifest, mode) for mode, score in scores.items()}
    return {
        **device,
        **cache,
        "tokens": windows.size,
        "same_as": same,
        **_compared(scores, checkpoint),
        "bytes_per_token": {mode: other_bytes(manifest) + sum(layers) for mode, layers in ffn.items()},
        "ffn_bytes_per_token": {mode: sum(layers) for mode, layers in ffn.items()},
        "tokens_per_s": speeds,
        "layers": _layer_rows(manifest, scores[modes[-1]], ffn),
    }


def _runs(options: LoadOptions, artifact: Path, modes: Sequence[str], origin: Checkpoint | None) -> dict[str, Run]:
    """What is scored, by name: the checkpoint, these modes, and `dense` with the usual cache beside another one."""
    runs: dict[str, Run] = {}
    if origin is not None:
        checkpoint_run = nullcontext(_reference(origin))
        runs["checkpoint"] = lambda: checkpoint_run
    runs |= {mode: partial(_examining, options, artifact, mode) for mode in modes}
    if options.cache_format != "auto":
        runs["usual cache"] = partial(_examining, replace(options, cache_format="auto"), artifact, "dense")
    return runs


def _timed(
    options: LoadOptions, artifact: Path, modes: Sequence[str], ids: npt.NDArray[np.int64]
) -> tuple[dict[str, object], dict[str, float]]:
    """The device, and tokens/s of each mode."""
    device: dict[str, object] = {}
    speeds: dict[str, float] = {}
    for mode in modes:
        with options.open(artifact, mode) as opened:
            device, speeds[mode] = device_of(opened), _tokens_per_s(opened, ids)
    return device, speeds


def _cache_row(name: str, dense: Score, usual: Score) -> dict[str, Any]:
    """How `dense` with keys and values in this format compares with itself in the usual one."""
    return {
        "format": name,
        "usual_perplexity": usual.perplexity,
        "increase_interval": _increase_interval(dense, usual),
        "agreement": _agreement(dense, usual),
    }


def counted(progress: Progress, total: int) -> Callable[[], None]:
    """A function to call after each of `total` steps, which reports how many are done."""
    counter = itertools.count(1)
    return lambda: progress(next(counter), total)


def modes_of(m: Manifest) -> list[str]:
    """The modes that an artifact can run in; each skips more than the one before."""
    leaves_out = any(not RUNGS[layer.rung].exact for layer in m.layers)
    return ["dense", "gate", *(["predicted"] if leaves_out else [])]


def same_as(m: Manifest) -> dict[str, str]:
    """The modes that read exactly what another one reads, and so compute the same: that one is scored for both.

    Gate leaves out what is exactly zero, and with some activations nothing is.
    """
    return {} if m.decoder.sparse else {"gate": "dense"}


def _windows(model: Model, texts: Sequence[Path | str], tokens: int, window: int) -> Windows:
    window = min(window, model.context)
    ids: list[int] = []
    for path in map(Path, texts):
        files = [f for f in shown_files(path) if f.suffix.lower() in TEXT] if path.is_dir() else [path]
        if not files:
            raise CorpusError(
                "no text in this folder",
                setting=Setting("text", path),
                expected=f"files ending in {', '.join(TEXT)}",
            )
        for file in files:
            if len(ids) >= tokens:
                break
            try:
                with file.open(encoding="utf-8-sig") as stream:
                    ids += model.tokenizer.encode(stream.read(CHARACTERS * (tokens - len(ids))), prefix=False)
            except (OSError, UnicodeDecodeError) as error:
                raise read_error(
                    Setting("text", file), error, "name a text file or a folder of them", CorpusError
                ) from None
    count = min(len(ids), tokens) // window
    if count == 0:
        raise CorpusError(f"the text has {len(ids)} tokens", expected=f"at least one window of {window}")
    return np.array(ids[: count * window], np.int64).reshape(count, window)


@contextmanager
def _examining(options: LoadOptions, artifact: Path, mode: str) -> Iterator[Examine]:
    with options.open(artifact, mode) as opened:
        yield opened.examine


def _reference(checkpoint: Checkpoint) -> Examine:
    logits = reference_logits(checkpoint)
    return lambda ids: (logits(ids, len(ids)), np.zeros((0, 3), np.int64))


def _tokens_per_s(model: Model, ids: npt.NDArray[np.int64]) -> float:
    cache, seconds = model.new_cache(), []
    for token in ids[: model.context]:
        began = time.perf_counter()
        model.decode(int(token), cache)
        seconds.append(time.perf_counter() - began)
        if sum(seconds) > TIMED_SECONDS and len(seconds) >= LEAST_TIMED:
            break
    return 1 / statistics.median(seconds)


def _compared(scores: Mapping[str, Score], checkpoint: Score | None) -> dict[str, Any]:
    """How well each mode predicts, and how that compares: `dense` with the checkpoint, the others with `dense`."""
    bases = {mode: checkpoint if mode == "dense" else scores["dense"] for mode in scores}
    return {
        "perplexity": {"checkpoint": checkpoint.perplexity if checkpoint else None}
        | {mode: score.perplexity for mode, score in scores.items()},
        "increase_interval": {mode: _increase_interval(scores[mode], base) for mode, base in bases.items()},
        "agreement": {mode: _agreement(scores[mode], base) for mode, base in bases.items()},
        "kl_divergence": {mode: score.divergence for mode, score in scores.items()},
    }


def _increase_interval(one: Score, base: Score | None) -> Interval | None:
    return None if base is None else increase_interval(one.losses_N, base.losses_N)


def _agreement(one: Score, base: Score | None) -> float | None:
    return None if base is None else float((one.best == base.best).mean())


def _layer_rows(m: Manifest, score: Score, ffn: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row for each layer, with the neurons that fire and those that are read in the mode that skips most."""
    rows = []
    for n, (layer, (fires, read, both)) in enumerate(zip(m.layers, score.counts_L3.tolist(), strict=True)):
        rows.append(
            {
                "layer": n,
                "rung": layer.rung,
                "density": fires / score.tokens / (m.decoder.experts_per_token * m.decoder.d_ff),
                "rank": layer.rank,
                "recall": both / max(fires, 1),
                "precision": both / max(read, 1),
                "rows_read_over_active": read / max(fires, 1),
                **{f"{mode}_bytes": layers[n] for mode, layers in ffn.items()},
            }
        )
    return rows
