"""Checkpoints whose linear layers are stored as integers: GPTQ's, AWQ's, compressed-tensors' and BitNet's."""
