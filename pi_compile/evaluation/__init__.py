"""Evaluation of an artifact: perplexity, agreement with the checkpoint, and tasks."""
