"""Any Zarr reader opens an artifact; zarr-python stands for them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.paths import GOLDEN

from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.quantisation import dequantise
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.sizes import scales_name

zarr = pytest.importorskip("zarr")


def values(name: str, found: dict[str, Any]) -> npt.NDArray[Any]:
    """What an array means, from what Zarr read and its own attributes alone."""
    fmt, columns = FORMATS[found[name].attrs["format"]], found[name].attrs["shape"][-1]
    if fmt.quantised:
        return dequantise(fmt, found[name][...], found[scales_name(name)][...], columns)
    return fmt.decode(found[name][...], columns)


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")
def test_zarr_reads_every_array() -> None:
    with zarr.storage.ZipStore(GOLDEN, mode="r") as store, Artifact.open(GOLDEN) as artifact:
        root = zarr.open_group(store, mode="r", zarr_format=3)
        assert dict(root.attrs) == {"format": "pi-artifact", "version": 1, "manifest": "manifest.json"}
        found = {path: node for path, node in root.members(max_depth=None) if isinstance(node, zarr.Array)}
        assert found.keys() == artifact.manifest.arrays.keys()
        for name, entry in artifact.manifest.arrays.items():
            array = found[name]
            stored = artifact.array(name)
            assert (array.shape, array.dtype) == (stored.shape, stored.dtype)
            assert dict(array.attrs) == {"format": entry.format, "shape": list(entry.shape)}
            np.testing.assert_array_equal(array[...], stored)
            np.testing.assert_array_equal(values(name, found), artifact.values(name))


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")
def test_groups_stand_between() -> None:
    with zarr.storage.ZipStore(GOLDEN, mode="r") as store:
        root = zarr.open_group(store, mode="r", zarr_format=3)
        groups = {path for path, node in root.members(max_depth=None) if isinstance(node, zarr.Group)}
        assert {"layers", "layers/0", "layers/0/ffn/norm", "layers/0/predictor", "final_norm"} <= groups
        assert "layers/1/predictor" not in groups
