"""The model in torch, block by block, for profiling and training."""
