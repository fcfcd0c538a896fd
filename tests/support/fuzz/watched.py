"""A watch over what one case takes: seconds of processor time, and bytes beyond what the process had."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 10.0
"""Five times what is wanted of an idle machine, because no test may depend on what else runs there."""
NBYTES = 256 << 20
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@contextmanager
def watched(case: str, seconds: float = SECONDS, nbytes: int = NBYTES) -> Iterator[None]:
    """Fail where what is done inside takes more than these. Memory is measured on Linux alone."""
    measured = _begin_peak()
    before, began = _field("VmRSS") if measured else 0, time.process_time()
    yield
    took = time.process_time() - began
    more = _field("VmHWM") - before if measured else 0
    if took > seconds or more > nbytes:
        gc.collect()
        raise AssertionError(f"{case}: {took:.2f} s and {more >> 20} MiB more memory")


def _begin_peak() -> bool:
    """Let the peak of the memory begin anew; whether the system can."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _field(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10
