"""Compile Hugging Face checkpoints into one `artifact.pi` that `pi_runtime` runs."""
