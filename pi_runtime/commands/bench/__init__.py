"""How fast an artifact is on this machine: prompts and decoding, alone and in batches, with the neurons they share."""
