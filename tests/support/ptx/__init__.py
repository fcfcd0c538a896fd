"""Runs what Triton compiled: PTX for sm_80 on the CPU, in NumPy, whole grids at once.

`launching` gives tests a device whose kernels are compiled for a GPU and run here. It is strict: an address outside its
tensor, a read of what nothing wrote, two threads at one place without a barrier between them, and an instruction
that it does not know are errors (`faults`).

From the text to the result: `parsing` reads it, `compiling` turns each instruction into a function of `arithmetic`,
`warps` or `memories`, and `machine` runs these for all threads of some programs, in an order that is drawn.
"""
