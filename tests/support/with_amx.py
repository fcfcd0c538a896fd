"""Run a script as on a processor with AMX, whose instructions a library carries out (`amx.c`).

`with_amx.py LIBRARY SCRIPT ARGUMENT…`. A process of its own, because the instruction set is chosen once.
"""

import ctypes
import runpy
import sys

from pi_runtime.kernels.codegen import isa


def main() -> None:
    library, *sys.argv = sys.argv[1:]
    met, lacking = ctypes.c_long.in_dll(ctypes.CDLL(library), "met"), isa.ask() != 0
    isa.ask = lambda: 0
    isa.ISA = isa.choose(isa.host_features() | isa.TILES, "amx")
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert met.value or not lacking, "nothing went by tiles"


if __name__ == "__main__":
    main()
