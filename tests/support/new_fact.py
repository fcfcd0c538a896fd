"""A fact of a decoder that the product does not have, made here as one record: written, read, documented, refused.

`new_fact.py`. A process of its own, because other modules know the decoder by its class.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pi_runtime.artifact import decoder
from pi_runtime.artifact.decoder import FLAG, LAYERS, Rule, fact

NAME = "damped"
GATED = Rule("with a gated FFN", lambda d: d.ffn == "gated")
FACTS: dict[str, Any] = {"damped": True, "damped_layers": (1,)}
FEATURE = f"decoder.{NAME}"


@dataclass(frozen=True, kw_only=True)
class Decoder(decoder.Decoder):
    """The product's, with two facts more, which the definition alone computes."""

    damped: bool = fact("attention is damped", FLAG, GATED, bodies=("numpy",))
    damped_layers: tuple[int, ...] = fact("layers where it is", LAYERS, of=NAME)


decoder.Decoder = Decoder  # type: ignore[misc]

from pi_runtime.artifact.decoding import canonical_json  # noqa: E402
from pi_runtime.artifact.features import FEATURES, lacking, refuse_lacking  # noqa: E402
from pi_runtime.artifact.guess_head import block_of  # noqa: E402
from pi_runtime.artifact.manifest_file import read_manifest  # noqa: E402
from pi_runtime.artifact.reader import Artifact  # noqa: E402
from pi_runtime.errors import ArtifactError, DoesNotFitError  # noqa: E402
from pi_runtime.kernels import reference  # noqa: E402
from support import fact_table  # noqa: E402
from support.synthetic import random_artifact, small_decoder  # noqa: E402


def changed(artifact: Path, **facts: object) -> str:
    """What is said of a manifest with other facts."""
    try:
        with Artifact.open(artifact) as opened:
            manifest = json.loads(canonical_json(opened.manifest))
        manifest["decoder"] |= facts
        read_manifest(canonical_json(manifest), "a.pi")
    except ArtifactError as error:
        return str(error)
    return ""


def check_file(folder: Path) -> None:
    """A file says it where it has it, under its name, and is refused where the value or what it needs is wrong."""
    plain, damped = random_artifact(folder / "plain.pi", small_decoder()), folder / "damped.pi"
    random_artifact(damped, small_decoder(**FACTS))
    with Artifact.open(plain) as without, Artifact.open(damped) as opened:
        assert NAME.encode() not in canonical_json(without.manifest)
        assert {*opened.manifest.features} - {*without.manifest.features} == {FEATURE, f"{FEATURE}_layers"}
        assert opened.manifest.decoder == small_decoder(**FACTS)
    assert "manifest.decoder.damped: expected bool, found 1" in changed(damped, damped=1)
    assert "decoder.damped: True, allowed only with a gated FFN" in changed(damped, ffn="plain")
    assert "decoder.damped_layers: (2,), expected list of layers, rising" in changed(damped, damped_layers=[2])
    assert "decoder.damped_layers: (1,), allowed only with damped" in changed(plain, damped_layers=[1])
    assert "not in canonical JSON" in changed(plain, damped=False)
    known = FEATURES.pop(FEATURE)
    assert f"found: {FEATURE}" in changed(damped)
    FEATURES[FEATURE] = known


def check_pages() -> None:
    """The table has its rows."""
    row = "| `damped` | boolean; false | attention is damped; only with a gated FFN | torch, cpu, gpu |\n"
    row += "| `damped_layers` | list of layers, rising; [] | layers where it is; only with `damped` |"
    assert row in fact_table.table()


def check_bodies(folder: Path) -> None:
    """Who computes it runs it; the others refuse it by name. A layer that is in no list is none of its layers."""
    from pi_compile.torch_model.decoder import layers
    from pi_runtime.cuda.executor import open_on_gpu
    from pi_runtime.execution.host_executor import in_memory

    d, undamped = small_decoder(**FACTS), reference.attention

    def attention(decoder: Any, w: Any, x_TD: Any, keys: Any) -> Any:
        return undamped(decoder, w, x_TD, keys) * (0.5 if decoder.damped else 1)

    reference.attention = attention
    with Artifact.open(folder / "damped.pi") as artifact, Artifact.open(folder / "plain.pi") as plain:
        assert (reference.forward(artifact, [1, 2, 3]) != reference.forward(plain, [1, 2, 3])).any()
        runs: dict[str, Callable[[], object]] = {
            "torch's layers": lambda: next(layers(d, [], [])),
            "the CPU's kernels": lambda: in_memory(artifact, "auto", 128, 2),
            "the GPU tier": lambda: open_on_gpu(artifact, "auto", 128, 1, index=0, vram_budget=None),
        }
        for name, run in runs.items():
            with pytest.raises(DoesNotFitError, match=f"(?s)^{name} does not compute.*found: {FEATURE}"):
                run()
    refuse_lacking(d, "numpy")
    assert lacking(d, "cpu") == [FEATURE]
    assert block_of(d) == block_of(small_decoder(damped=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check_file(Path(name))
        check_pages()
        check_bodies(Path(name))
    print(NAME)
