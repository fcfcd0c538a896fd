"""Predictors of all layers: written and read one layer at a time, in the bytes that they always had."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pi_compile.errors import ProfileError
from pi_compile.files import check_arrays, read_arrays, write_array_stream, write_arrays
from pi_compile.results import LayerRow, Matrices, PredictorSet, PredictorsOnDisk

RNG = np.random.default_rng(0)
ARRAYS = {"b": RNG.standard_normal((30, 7)), "a": np.arange(5), "meta": np.array("text"), "empty": np.zeros((0, 3))}


def test_a_stream_has_the_bytes_of_a_whole(tmp_path: Path) -> None:
    write_arrays(tmp_path / "whole.npz", ARRAYS)
    write_array_stream(tmp_path / "stream.npz", iter(ARRAYS.items()))
    assert (tmp_path / "stream.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert list(read_arrays(tmp_path / "stream.npz", names=("a", "empty", "other"))) == ["a", "empty"]


def test_a_stream_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        write_array_stream(tmp_path / "a.npz", ((name, np.array(1 // n)) for n, name in ((1, "a"), (0, "b"))))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("at", [0, 200, -10], ids=["start", "middle", "end"])
def test_a_damaged_file_is_found(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a.npz"
    write_arrays(path, ARRAYS)
    check_arrays(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x55
    path.write_bytes(data[: len(data) + min(at, 0)])
    with pytest.raises(ProfileError):
        check_arrays(path)


def row(rank: int | None) -> LayerRow:
    fields: dict[str, Any] = dict.fromkeys(LayerRow.__dataclass_fields__, 1.0)
    fields |= {"rung": "predicted" if rank else "gate", "rank": rank, "threshold": None}
    return LayerRow(**fields)


def predictor(n: int, rank: int | None) -> Matrices | None:
    rng = np.random.default_rng(n)
    if rank is None:
        return None
    shapes = ((rank, 6), (20, rank), (20,))
    down, up, bias = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return down, up, bias


RANKS = (3, None, *range(2, 12))
"""Twelve layers, so that one layer's name begins with another's."""


def stored(predictors: Any) -> PredictorSet:
    return PredictorSet(
        rows=tuple(map(row, RANKS)), predictors=predictors, predictor_format="f16", counts=(None,) * len(RANKS),
        counted_tokens=5, perplexity={"report": 2.0}, inputs="key",
    )  # fmt: skip


def test_predictors_are_read_a_layer_at_a_time(tmp_path: Path) -> None:
    asked: list[int] = []

    def read(n: int) -> Matrices | None:
        asked.append(n)
        return predictor(n, RANKS[n])

    lazy = stored(PredictorsOnDisk(len(RANKS), read))
    assert asked == []
    lazy.save(tmp_path / "lazy.npz")
    assert asked == list(range(len(RANKS)))
    whole = stored(tuple(predictor(n, rank) for n, rank in enumerate(RANKS)))
    whole.save(tmp_path / "whole.npz")
    assert (tmp_path / "lazy.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert lazy.digest() == whole.digest()
    loaded = PredictorSet.load(tmp_path / "lazy.npz")
    assert loaded.digest() == whole.digest()
    kept = loaded.in_memory()
    (tmp_path / "lazy.npz").unlink()
    for found, wanted in zip(kept.predictors, whole.predictors, strict=True):
        assert (found is None) == (wanted is None)
        assert all(np.array_equal(a, b) for a, b in zip(found or (), wanted or (), strict=True))
    with pytest.raises(FileNotFoundError):
        loaded.predictors[0]
    assert loaded.predictors[1] is None
    assert len(kept.predictors[2:4]) == 2


def test_a_predictor_that_is_not_there(tmp_path: Path) -> None:
    stored(tuple(predictor(n, rank) for n, rank in enumerate(RANKS))).save(tmp_path / "a.npz")
    arrays = read_arrays(tmp_path / "a.npz")
    del arrays["down-0"]
    write_arrays(tmp_path / "a.npz", arrays)
    with pytest.raises(ProfileError, match="down-0"):
        PredictorSet.load(tmp_path / "a.npz").in_memory()


def test_a_description_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "deep.npz", {"meta": np.array("[" * 100_000)})
    with pytest.raises(ProfileError, match=r"not a file of trained predictors\n.*\n  try: remove it"):
        PredictorSet.load(tmp_path / "deep.npz")
