"""How long a token takes: a model's work, a machine's processors, and the time of one on the other."""
