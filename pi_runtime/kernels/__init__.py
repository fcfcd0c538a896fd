"""Operators: a NumPy reference that defines them, and compiled twins."""

SUMS = 3
"""The version of the sums. Whoever changes a bit that they give raises it: stored keys and values are found by it."""
