"""A prompt in blocks on the GPU, cold weights streamed to it where that is quicker."""
