"""Operators: a NumPy reference that defines them, and compiled twins."""
