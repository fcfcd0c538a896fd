"""Weights rounded to few bits so that the model's outputs change least: GPTQ, on the text that is profiled too."""

from pi_compile.quantising.stage import CALIBRATED, QuantiseSpec, estimate, memory_bytes, quantise_weights

__all__ = ["CALIBRATED", "QuantiseSpec", "estimate", "memory_bytes", "quantise_weights"]
