"""How an artifact is opened to be evaluated."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pi_runtime import Model, load
from pi_runtime.console import size


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of `pi_runtime.load`; on the CPU by default."""

    device: str = "cpu"
    vram_budget: int | None = None
    """Bytes of GPU memory; None for what is free."""
    context: int | None = None
    """Positions of the cache; None for what the caller needs."""
    cache_format: str = "auto"
    """How keys and values are held."""
    threads: int | None = None
    tell: Callable[[str], object] = lambda _line: None
    """Is called with a line that names the placement in use, or says why the GPU is not used."""

    def open(self, artifact: Path, mode: str, context: int | None = None) -> Model:
        """Open the artifact; `context` is used if the options have none. Raises what `load` does."""
        opened = load(
            artifact,
            mode=mode,
            context=context if self.context is None else self.context,
            threads=self.threads,
            device=self.device,
            vram_budget=self.vram_budget,
            cache_format=self.cache_format,
        )
        if opened.notice is not None:
            self.tell(opened.notice)
        if opened.plan is not None:
            self.tell(f"{opened.device}: by the placement for {size(opened.plan.vram_bytes)} of GPU memory")
        return opened

    def open_on_cpu(self, artifact: Path) -> Model:
        """Open the artifact to read its manifest, tokenizer and context; the GPU is not used."""
        return load(artifact, context=self.context, threads=self.threads, device="cpu")


ON_CPU = LoadOptions()


def device_of(opened: Model) -> dict[str, object]:
    """The device that a model runs on, and the budget that its placement was solved for."""
    return {"device": opened.device, "vram_bytes": None if opened.plan is None else opened.plan.vram_bytes}
