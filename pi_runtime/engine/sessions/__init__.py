"""Texts that are continued in turns: what is kept of them meanwhile, and as files."""
