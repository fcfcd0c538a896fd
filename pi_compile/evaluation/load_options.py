"""Where an artifact is run when it is evaluated."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pi_runtime import Model, load
from pi_runtime.console import size


@dataclass(frozen=True, kw_only=True)
class Where:
    """As `pi_runtime.load` takes it; the CPU unless something else is asked for."""

    device: str = "cpu"
    vram_budget: int | None = None
    """Bytes."""
    context: int | None = None
    threads: int | None = None
    tell: Callable[[str], object] = lambda _line: None
    """Told which placement a model runs by, or why it is not on the GPU."""

    def open(self, artifact: Path, mode: str, context: int | None = None) -> Model:
        """`context`: enough where none was asked for. Raises what `load` does."""
        wanted = context if self.context is None else self.context
        opened = load(
            artifact,
            mode=mode,
            context=wanted,
            threads=self.threads,
            device=self.device,
            vram_budget=self.vram_budget,
        )
        if opened.notice is not None:
            self.tell(opened.notice)
        if opened.plan is not None:
            self.tell(f"{opened.device}: by the placement for {size(opened.plan.vram_bytes)} of GPU memory")
        return opened

    def read(self, artifact: Path) -> Model:
        """For what an artifact says of itself, its tokens and its context: no GPU is touched."""
        return load(artifact, context=self.context, threads=self.threads, device="cpu")


CPU = Where()


def place_of(opened: Model) -> dict[str, object]:
    """Where a model runs, and the budget its placement was solved for."""
    return {"device": opened.device, "vram_bytes": None if opened.plan is None else opened.plan.vram_bytes}
