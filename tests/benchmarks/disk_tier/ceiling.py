"""The device's own rate: random direct reads of one size by threads that do nothing else."""

import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np

from pi_runtime.disk.kernels.c_calls import c_address, call_c
from pi_runtime.kernels.codegen.jit import public
from pi_runtime.kernels.data.matrix_view import Ints

_READS = 64
"""Reads between two looks at the clock."""


@public
def _read(pread: int, fd: int, buffer: int, nbytes: int, offset_I: Ints) -> int:
    done = 0
    for offset in offset_I:
        done += call_c(pread, fd, buffer, nbytes, offset)
    return done


def device_rate(path: Path, nbytes: int, depth: int, seconds: float = 1.0) -> float:
    """Bytes per second of random direct reads of `nbytes`, `depth` at once."""
    fd, pread, places = os.open(path, os.O_RDONLY | os.O_DIRECT), c_address("pread"), path.stat().st_size // nbytes
    done, end = [0] * depth, 0.0

    def read(n: int) -> None:
        rng, memory = np.random.default_rng(n), mmap.mmap(-1, nbytes)
        buffer = int(np.frombuffer(memory, np.uint8).ctypes.data)
        while time.monotonic() < end:
            done[n] += _read(pread, fd, buffer, nbytes, rng.integers(0, places, _READS) * nbytes)

    _read(pread, fd, 0, 0, np.zeros(0, np.int64))  # compiles it
    threads = [threading.Thread(target=read, args=(n,)) for n in range(depth)]
    began = time.monotonic()
    end = began + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return sum(done) / (time.monotonic() - began)
