"""Evaluate: how faithful a packed artifact is, run through the runtime itself.

Perplexity and agreement come from `logits`, with the mode's selection at every position; rows, bytes and speed from
decoding token by token, which skips for real. T tokens, L layers, V vocabulary.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_compile.errors import CheckpointError, CorpusError
from pi_runtime import Model, load
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.schema import Manifest

Progress = Callable[[int, int], None]
Windows = npt.NDArray[np.int64]
DECODED = 512
"""Tokens decoded one by one for rows, bytes and speed."""


@dataclass(frozen=True, eq=False)
class Score:
    """One mode on the windows."""

    perplexity: float
    best: npt.NDArray[np.int64]
    """Likeliest next token at every position."""


def evaluate(
    artifact: Path, texts: Sequence[Path], model: Path | None, *, tokens: int, window: int, progress: Progress
) -> dict[str, Any]:
    """Perplexity, top-1 agreement, bytes per token and tokens/s by mode, and a row a layer.

    `model`: the checkpoint the artifact was packed from, scored by transformers in float32. Agreement of `dense` is
    with the checkpoint, of the others with `dense`. Raises CorpusError for a text shorter than one window.
    """
    scores: dict[str, Score] = {}
    decoded: dict[str, Decoded] = {}
    with load(artifact) as opened:
        manifest, windows = opened.manifest, _windows(opened, texts, tokens, window)
    modes = ["dense", "gate", *(["predicted"] if any(layer.rung == "predicted" for layer in manifest.layers) else [])]
    done = 0

    def scored_window() -> None:
        nonlocal done
        done += 1
        progress(done, len(windows) * len(modes))

    for mode in modes:
        with load(artifact, mode=mode) as opened:
            scores[mode] = _score(opened.logits, windows, scored_window)
            decoded[mode] = _decode(opened, windows.reshape(-1)[:DECODED])
    checkpoint = _score_checkpoint(model, windows) if model is not None else None
    perplexity = {"checkpoint": checkpoint.perplexity if checkpoint else None}
    agreement = {"dense": _agreement(scores["dense"], checkpoint)}
    return {
        "tokens": windows.size,
        "perplexity": perplexity | {mode: score.perplexity for mode, score in scores.items()},
        "agreement": agreement | {mode: _agreement(scores[mode], scores["dense"]) for mode in modes[1:]},
        "bytes_per_token": {mode: other_bytes(manifest) + sum(d.ffn_bytes(manifest)) for mode, d in decoded.items()},
        "ffn_bytes_per_token": {mode: sum(d.ffn_bytes(manifest)) for mode, d in decoded.items()},
        "tokens_per_s": {mode: d.tokens_per_s for mode, d in decoded.items()},
        "layers": _layer_rows(manifest, decoded),
    }


@dataclass(frozen=True, eq=False)
class Decoded:
    """What decoding token by token read."""

    rows_LT2: npt.NDArray[np.int64]
    """Rows of `first` read, neurons kept."""
    mode: str
    tokens_per_s: float

    def ffn_bytes(self, m: Manifest) -> list[float]:
        """FFN bytes per token of each layer, the predictor's included."""
        d, fmt = m.decoder, FORMATS[m.formats["ffn"]]
        row = fmt.nbytes((1, d.d_model))
        rest = row * (2 if d.ffn == "gated" else 1)
        read, kept = self.rows_LT2.mean(1).T
        totals = []
        for n, layer in enumerate(m.layers):
            predictor = 0
            if self.mode == "predicted" and layer.rung == "predicted":
                names = [f"layers/{n}/predictor/{part}" for part in ("down", "up", "bias")]
                predictor = sum(m.arrays[name].nbytes for name in names)
            totals.append(predictor + float(read[n]) * row + float(kept[n]) * rest)
        return totals


def _windows(model: Model, texts: Sequence[Path], tokens: int, window: int) -> Windows:
    window = min(window, model.context)
    ids: list[int] = []
    for path in texts:
        try:
            ids += model.tokenizer.encode(path.read_text(encoding="utf-8"), prefix=False)
        except (OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"--text {path}: cannot be read as text", found=error) from None
    count = min(len(ids), tokens) // window
    if count == 0:
        raise CorpusError(f"the text has {len(ids)} tokens", expected=f"at least one window of {window}")
    return np.array(ids[: count * window], np.int64).reshape(count, window)


def _score(logits: Callable[[Windows], npt.NDArray[np.float32]], windows: Windows, step: Callable[[], None]) -> Score:
    loss, best = 0.0, []
    for ids in windows:
        rows = logits(ids)[:-1].astype(np.float64)
        rows -= rows.max(1, keepdims=True)
        logp = rows - np.log(np.exp(rows).sum(1, keepdims=True))
        loss -= float(logp[np.arange(len(rows)), ids[1:]].sum())
        best.append(logp.argmax(1))
        step()
    return Score(math.exp(loss / (windows.size - len(windows))), np.concatenate(best))


def _score_checkpoint(model: Path, windows: Windows) -> Score:
    import torch  # noqa: PLC0415  only where a checkpoint is compared
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"--model {model}: transformers cannot load it", found=error) from None

    def logits(ids: Windows) -> npt.NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(loaded(torch.from_numpy(ids)[None]).logits[0])

    return _score(logits, windows, lambda: None)


def _decode(model: Model, ids: npt.NDArray[np.int64]) -> Decoded:
    cache, rows, seconds = model.new_cache(), [], []
    for token in ids[: model.context]:
        began = time.perf_counter()
        _, read = model.decode(int(token), cache)
        seconds.append(time.perf_counter() - began)
        rows.append(read)
    return Decoded(np.stack(rows, axis=1), model.mode, 1 / statistics.median(seconds))


def _agreement(one: Score, other: Score | None) -> float | None:
    return None if other is None else float((one.best == other.best).mean())


def other_bytes(m: Manifest) -> int:
    """Bytes per token of everything but the FFN neurons: attention, norms, head. Of the embedding one row is read."""
    skipped = ("ffn/first", "ffn/rest", "ffn/order", "ffn/counts", "positions")
    total = 0
    for name, entry in m.arrays.items():
        local = name.split("/", 2)[-1]
        if name == "embedding" and not m.decoder.tied_head:
            continue
        if local not in skipped and not local.startswith("predictor/"):
            total += entry.nbytes
    return total


def _layer_rows(m: Manifest, decoded: dict[str, Decoded]) -> list[dict[str, Any]]:
    """Recall counts what the gate rung kept on the same tokens as what fires."""
    rows = []
    active = decoded["gate"].rows_LT2[:, :, 1].sum(1)
    last = decoded.get("predicted", decoded["gate"])
    read, kept = last.rows_LT2.sum(1).T
    tokens = last.rows_LT2.shape[1]
    bytes_by_mode = {mode: d.ffn_bytes(m) for mode, d in decoded.items()}
    for n, layer in enumerate(m.layers):
        rows.append(
            {
                "layer": n,
                "rung": layer.rung,
                "density": float(active[n] / tokens / m.decoder.d_ff),
                "rank": layer.rank,
                "recall": float(kept[n] / max(active[n], 1)),
                "precision": float(kept[n] / max(read[n], 1)),
                "rows_read_over_active": float(read[n] / max(active[n], 1)),
                **{f"{mode}_bytes": per_layer[n] for mode, per_layer in bytes_by_mode.items()},
            }
        )
    return rows
