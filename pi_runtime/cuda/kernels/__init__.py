"""Triton kernels, each beside the launcher that checks its arguments."""
