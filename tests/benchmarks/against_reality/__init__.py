"""What the benchmark `reality` is made of."""
