"""Reads prompts in blocks of tokens, without selection.

The GPU computes the hot neurons. Cold ones are computed on the CPU, or on the GPU where streaming their weights to it
is quicker.
"""
