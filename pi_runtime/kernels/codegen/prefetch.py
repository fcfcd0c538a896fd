"""How far ahead of what they read the products fetch rows that follow each other, by processor.

Rows that lie apart or come from a list are fetched 16 KiB ahead on every processor (`ops.row_products`): of these no
other distance was found to be quicker. `PI_PREFETCH` names another line of the table, to be tried or because a virtual
machine names its processor wrongly.
"""

import os
from dataclasses import dataclass

import llvmlite.binding

from pi_runtime.errors import UsageError


@dataclass(frozen=True)
class Ahead:
    """Within a row and into the next: so many bytes ahead, to a cache level, in formats of some bits a weight."""

    nbytes: int
    level: int
    bits: tuple[int, ...]


USUAL = Ahead(0, 2, ())
"""Nothing within rows: later rows are asked for twice, 32 and 16 KiB ahead, which was the quickest on Zen 2 to 4."""
_XEON = Ahead(1024, 1, (8,))
"""Two threads of a Xeon with AMX, q8 in C: 32.0 GB/s against 24.9 by the usual way and 26.1 without fetching; its core
keeps too few requests on their way to the second level. In q4 this takes longer than the usual way."""
PROCESSORS = {"usual": USUAL, "sapphirerapids": _XEON, "emeraldrapids": _XEON}
"""By LLVM's name of the processor; others have the usual way."""


def choose(processor: str, wanted: str | None) -> Ahead:
    """The line of a processor, or the one asked for. Raises UsageError for one that is not there."""
    if wanted is not None and wanted not in PROCESSORS:
        raise UsageError(f"PI_PREFETCH={wanted}: no such line", expected=" or ".join(PROCESSORS))
    return PROCESSORS.get(wanted or processor, USUAL)


AHEAD = choose(llvmlite.binding.get_host_cpu_name(), os.environ.get("PI_PREFETCH"))
"""What this process compiles for."""
