"""Compile Hugging Face checkpoints into one `artifact.pi` that `pi_runtime` runs.

    from pi_compile import open_checkpoint, pack

    pack(open_checkpoint("path/to/checkpoint"), "model.pi")

The stages in their order are `open_checkpoint`, `read_corpus`, `profile`, `train`, `place`, `quantise`, `pack` and
`evaluate`; `docs/reference/python.md` goes through them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi_compile.checkpoint import open_checkpoint as open_checkpoint
    from pi_compile.evaluation import evaluate as evaluate
    from pi_compile.pipeline.stages import pack as pack
    from pi_compile.pipeline.stages import place as place
    from pi_compile.pipeline.stages import profile as profile
    from pi_compile.pipeline.stages import quantise as quantise
    from pi_compile.pipeline.stages import read_corpus as read_corpus
    from pi_compile.pipeline.stages import train as train

__all__ = ["evaluate", "open_checkpoint", "pack", "place", "profile", "quantise", "read_corpus", "train"]

_STAGES = "pi_compile.pipeline.stages"
_HOMES = {
    **dict.fromkeys(("pack", "place", "profile", "quantise", "read_corpus", "train"), _STAGES),
    "evaluate": "pi_compile.evaluation",
    "open_checkpoint": "pi_compile.checkpoint",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: asking for --help must not load torch.
    if name in _HOMES:
        import importlib  # noqa: PLC0415

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
