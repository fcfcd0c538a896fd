"""Run a sparse language model from one `artifact.pi`.

    from pi_runtime import load

    with load("artifact.pi") as model:
        for piece in model.generate("Once upon a time"):
            print(piece, end="")

`Sampling` says how tokens are drawn, `Grammar` what an answer must be. `Model` is what `load` gives, and `Engine`
serves many requests with one model.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pi_runtime.engine.engine import Engine as Engine
    from pi_runtime.engine.loading import load as load
    from pi_runtime.engine.model import Model as Model
    from pi_runtime.sequence.sampling import Sampling as Sampling
    from pi_runtime.text.grammar import Grammar as Grammar

__all__ = ["Engine", "Grammar", "Model", "Sampling", "load"]

_HOMES = {
    "Engine": "pi_runtime.engine.engine",
    "Grammar": "pi_runtime.text.grammar",
    "Model": "pi_runtime.engine.model",
    "Sampling": "pi_runtime.sequence.sampling",
    "load": "pi_runtime.engine.loading",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: importing the contract, or asking for --help, must not load numba.
    if name in _HOMES:
        import importlib  # noqa: PLC0415

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
