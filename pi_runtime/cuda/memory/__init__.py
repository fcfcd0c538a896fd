"""The GPU's memory and the way to it.

Here are devices, the weights that a plan puts on one, pinned buffers, the memory that decoding works in, streamed
weights, and the sequence whose keys and values are on the GPU.
"""
