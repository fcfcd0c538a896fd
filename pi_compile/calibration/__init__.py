"""What stages learn from a text by running a model on it, layer by layer: counts of neurons, and rounded weights.

`profiling` and `quantising` are stages: neither imports the other.
"""
