"""What stages hand to each other: records that are saved whole and loaded with their digests.

The activation profile of `profile`, the order of the neurons that follows from it, the predictors of `train`, the
formats that `divide` chose, and the matrices that `quantise` has rounded.
"""

from pi_compile.results.activation_profile import (
    GROUP,
    MILLION,
    WINDOWS,
    ActivationProfile,
    Counts,
    LayerWork,
    order_neurons,
)
from pi_compile.results.predictor_set import LayerRow, Matrices, PredictorSet, PredictorsOnDisk
from pi_compile.results.quantised_weights import Division, QuantisedWeights, Stored, read_stored, stored_entries
