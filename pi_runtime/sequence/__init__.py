"""A sequence: its tokens, the settings of its answer, how tokens are chosen and drafted, and its figures."""
