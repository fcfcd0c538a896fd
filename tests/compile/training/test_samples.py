"""FFN inputs on disk: written in any order by any worker, and never taken for what they are not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("zarr")

import numpy as np
import torch

from pi_compile.training.samples import BATCH, CHUNK, PushedText, Samples

WIDTH, TOKENS, WINDOWS = 8, 1000, 2 * BATCH + 1
"""Tokens of a window that fill no chunk of a reader; the last batch has one window."""


@pytest.fixture
def pushed(tmp_path: Path) -> Any:
    """A text of five windows, of which no batch has been pushed."""
    checkpoint: Any = SimpleNamespace(decoder=SimpleNamespace(neuron_width=WIDTH, router_apart=False))
    ids_NT = torch.zeros(WINDOWS, TOKENS, dtype=torch.int64)
    return PushedText(checkpoint, None, ids_NT, "fit", tmp_path, "cpu")  # type: ignore[arg-type]


def values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((WINDOWS * TOKENS, WIDTH), np.float32)


def write(pushed: PushedText, *batches: int) -> None:
    for n in batches:
        rows = slice(n * BATCH * TOKENS, (n + 1) * BATCH * TOKENS)
        pushed._inputs(3)[rows] = values()[rows]


def samples(pushed: PushedText) -> Samples:
    import zarr

    return Samples(zarr.open_array(pushed._inputs_folder(3), mode="r"), 1.0, "cpu")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 2, 0, 0)], ids=str)
def test_batches_come_in_any_order_and_more_than_once(pushed: PushedText, order: tuple[int, ...]) -> None:
    write(pushed, *order)
    found = samples(pushed)
    assert torch.equal(torch.cat(list(found.blocks())), torch.from_numpy(values()))
    assert torch.equal(torch.cat(list(found.blocks(100))), torch.from_numpy(values()))
    assert CHUNK < WINDOWS * TOKENS < 2 * CHUNK


def test_a_batch_that_is_gone_is_an_error(pushed: PushedText) -> None:
    """A worker that slept through its search must not write what it finds of zeros."""
    write(pushed, 0, 2)
    with pytest.raises(FileNotFoundError, match="samples are missing"):
        list(samples(pushed).blocks())


def test_inputs_that_are_forgotten(pushed: PushedText) -> None:
    write(pushed, 0, 1, 2)
    found = samples(pushed)
    pushed.forget(3)
    pushed.forget(3)
    with pytest.raises(FileNotFoundError):
        list(found.blocks())
    with pytest.raises(FileNotFoundError):
        samples(pushed)


def test_a_damaged_chunk_is_found(pushed: PushedText) -> None:
    write(pushed, 0, 1, 2)
    chunk = pushed._inputs_folder(3) / "c" / "1" / "0"
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        list(samples(pushed).blocks())
