"""Parts of the disk tier's benchmark: a memory limit, the device's own rate, our engine in a child, cache policies."""

CONTEXT = 512
"""Positions of every run."""
