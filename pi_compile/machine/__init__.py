"""Machines: the profile of one, measuring this one, and what is installed on it.

Measuring needs the runtime's kernels, so `measurement` and `doctor` are imported only where they run.
"""

from pi_compile.machine.profile import Cpu, Disk, Gpu, Machine, Rates, find_machine, in_bytes, to_units
