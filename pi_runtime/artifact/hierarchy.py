"""The Zarr v3 hierarchy around the arrays: one `zarr.json` a node, generated, so that any Zarr reader opens the file.

Source: Zarr core specification 3.1. Every array is one chunk under the codec `bytes`. Shapes are the stored ones;
the logical shape and the number format stand in the array's attributes.
"""

from collections.abc import Mapping
from typing import Any

from pi_runtime.artifact.decoding import canonical_json
from pi_runtime.artifact.formats import FORMATS
from pi_runtime.artifact.sizes import ArraySpec

DOCUMENT = "zarr.json"


def chunk_name(array: str, spec: ArraySpec) -> str:
    """Name of the entry that holds an array's only chunk: `layers/0/ffn/first` → `layers/0/ffn/first/c/0/0`."""
    return f"{array}/c" + "/0" * len(spec.shape)


def documents(specs: Mapping[str, ArraySpec], root_attributes: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Every `zarr.json` as (entry name, content): the root's first, then those of the other nodes by name."""
    group = canonical_json(_group({}))
    arrays: dict[ArraySpec, bytes] = {}
    nodes = dict.fromkeys((parent for name in specs for parent in _parents(name)), group)
    for name, spec in specs.items():
        if spec not in arrays:
            arrays[spec] = canonical_json(_array(spec))
        nodes[name] = arrays[spec]
    root = (DOCUMENT, canonical_json(_group(root_attributes)))
    return [root, *((f"{name}/{DOCUMENT}", nodes[name]) for name in sorted(nodes))]


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _group(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _array(spec: ArraySpec) -> dict[str, Any]:
    fmt = FORMATS[spec.format]
    shape = fmt.stored_shape(spec.shape)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": fmt.stored.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0 if fmt.stored.kind == "f" else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"format": spec.format, "shape": spec.shape},
    }
