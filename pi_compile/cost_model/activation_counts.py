"""How often the neurons of a model fire: what is known of it from a profile or from a published curve."""

from collections.abc import Mapping
from dataclasses import dataclass

from pi_compile.cost_model.default_rungs import untrained_layers
from pi_compile.cost_model.workload import Ints, LayerWork, Workload
from pi_runtime.artifact.decoder import Decoder


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivationCounts:
    """Counts of one model over some tokens, and the rungs that training chose with them."""

    counts: Ints
    """(layers, neurons) in stored order, as `Workload` has it."""
    tokens: int
    routed: Ints | None = None
    """(layers, experts) as `Workload` has it."""
    layers: tuple[LayerWork, ...] = ()
    """Rungs and ranks as trained; () where nothing was."""
    source: str
    """Where the counts come from, in words."""

    def workload(self, decoder: Decoder, formats: Mapping[str, str], context: int) -> Workload:
        """The model as it is to be run: rungs and ranks by rule where they are not trained; a cache of at most all
        positions that the model has."""
        return Workload(
            decoder=decoder,
            formats=formats,
            tokens=self.tokens,
            counts=self.counts,
            routed=self.routed,
            layers=self.layers or untrained_layers(decoder),
            context=min(context, decoder.context_length),
        )
