"""Fuzzing: damage made by rule and seed, and a watch over time and memory while the product meets it."""
