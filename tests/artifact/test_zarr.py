"""Any Zarr reader opens an artifact; zarr-python stands for them."""

from pathlib import Path

import numpy as np
import pytest

from pi_runtime.artifact import Artifact
from pi_runtime.artifact.formats import FORMATS

zarr = pytest.importorskip("zarr")
GOLDEN = Path(__file__).with_name("golden.pi")


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
            np.testing.assert_array_equal(
                FORMATS[entry.format].decode(array[...], entry.shape[-1]), artifact.values(name)
            )


@pytest.mark.filterwarnings("ignore:Object at .* is not recognized:UserWarning")
def test_groups_stand_between() -> None:
    with zarr.storage.ZipStore(GOLDEN, mode="r") as store:
        root = zarr.open_group(store, mode="r", zarr_format=3)
        groups = {path for path, node in root.members(max_depth=None) if isinstance(node, zarr.Group)}
        assert {"layers", "layers/0", "layers/0/ffn/norm", "layers/0/predictor", "final_norm"} <= groups
        assert "layers/1/predictor" not in groups
