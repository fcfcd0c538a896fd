"""Triton kernels, each beside the launcher that checks its arguments.

Kernels and launchers know matrices, lists of neurons and vectors, but no layers and no artifact.
"""
