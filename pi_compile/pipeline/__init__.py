"""The stages of a recipe in their order, their results on disk, and the lock of its placements."""
