"""GGUF files, read as if they were Hugging Face checkpoints."""
