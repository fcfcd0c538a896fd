"""Runs on a GPU and the CPU together: Triton kernels, and the executor that keeps both at work.

Everything here needs torch and Triton, the extra `cuda`. Nothing outside imports it before a GPU is asked for.
"""
