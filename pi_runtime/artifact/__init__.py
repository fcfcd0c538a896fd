"""The artifact format: the contract between compiler and runtime. NumPy and the standard library only."""
