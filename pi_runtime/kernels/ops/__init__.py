"""Operators on stored rows, one a file: dot products, gathered sums, products of blocks, attention."""
