"""Checkpoints whose linear layers are stored as integers: GPTQ's, AWQ's and compressed-tensors'."""
