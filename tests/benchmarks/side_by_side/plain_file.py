"""The weights of an artifact by neuron as whole matrices: what `pack --plain` makes of a model that is not sparse."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pi_runtime.artifact.layout import manifest_specs
from pi_runtime.artifact.reader import Artifact
from pi_runtime.artifact.rungs import DENSE
from pi_runtime.artifact.schema import Layer
from pi_runtime.artifact.sizes import WHOLE, is_scales
from pi_runtime.artifact.writer import ArtifactWriter


def write_plain(source: Path, path: Path) -> None:
    """Write it, layer by layer; rows of `down` are rounded again, along the neurons."""
    with Artifact.open(source) as artifact, ArtifactWriter(path) as writer:
        m = artifact.manifest
        plain = replace(
            m, layers=(Layer(rung=DENSE),) * len(m.layers), ffn_layout=WHOLE, features=(), arrays={}, files={}
        )
        for name, spec in manifest_specs(plain).items():
            if not is_scales(name):
                writer.add_array(name, spec, _blocks(artifact, name))
        for name in m.files:
            writer.add_file(name, artifact.file(name))
        writer.finish(plain)


def _blocks(artifact: Artifact, name: str) -> Iterator[npt.NDArray[Any]]:
    layer, _, local = name.rpartition("/ffn/")
    if local not in ("up", "down"):
        yield artifact.values(name)
        return
    rest = artifact.values(f"{layer}/ffn/rest")
    yield rest[:, 0] if local == "up" else np.ascontiguousarray(rest[:, -1].T)
