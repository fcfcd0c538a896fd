"""Weights rounded to few bits so that the model's outputs change least, and what rounding costs on a text.

GPTQ, on the text that is profiled too.
"""

from pi_compile.calibration.quantising.loss import (
    RoundingLoss,
    Sensitivity,
    Values,
    packed_values,
    seconds_of_a_pass,
    sensitivities,
    source_values,
    text_losses,
    text_windows,
)
from pi_compile.calibration.quantising.stage import QuantiseSpec, coarse, estimate, memory_bytes, quantise_weights
