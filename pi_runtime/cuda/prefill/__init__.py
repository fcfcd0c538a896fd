"""Reads prompts in blocks on the GPU; cold weights are streamed to it where that is quicker."""
