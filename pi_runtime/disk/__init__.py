"""The disk tier: FFN rows that do not fit in memory are read from the artifact when they are needed.

`reader` reads them, `arena` holds them, `neuron_cache` says which are there, `ram_plan` divides the memory.
"""
