"""How kernels are compiled: numba's decorators, instruction sets, and the vector instructions."""
