"""How good an artifact is: perplexity, agreement with the checkpoint, and tasks."""
