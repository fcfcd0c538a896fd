"""What the train stage is asked for: the rungs and formats that are tried, and the quality budget."""

from dataclasses import dataclass

from pi_compile.cost_model import PICO, Processor
from pi_runtime.artifact.rungs import RUNGS

BYTES = Processor("bytes", 0, {"": PICO}, {}, None)
"""A processor that reads one byte a picosecond, in any format and order: times are bytes."""
TUNE_FRACTIONS = (0.25, 0.0625, 0.0)
"""Fractions of the quality budget that may be spent on the tune text: the next is tried if the report text refuses one.

Other text costs more than the one that was tuned on. 0 is the least error in every layer.
"""


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How rungs are tried and chosen."""

    window: int = 512
    batch: int = 512
    steps: int = 400
    learning_rate: float = 3e-3
    perplexity_increase: float = 0.001
    """Largest relative increase of perplexity that all layers together may cost."""
    predictor_formats: tuple[str, ...] = ("f16",)
    """Number formats that predictors may have; all layers have the same."""
    ffn_format: str = "f16"
    rungs: tuple[str, ...] = tuple(RUNGS)
    """Rungs a layer may take. Without dense and gate the quality budget may be out of reach."""
    processor: Processor = BYTES
    """The processor that times are predicted for."""
    seed: int = 0
    threads: int = 1
    """Threads that a task computes with. They can change the last bits of a result."""
    device: str = "cpu"

    def layer_error(self, n_layers: int) -> float:
        """Roughly the error that one layer may make; the search for a rank leaves out predictors with more."""
        return TUNE_FRACTIONS[0] * self.perplexity_increase / n_layers
