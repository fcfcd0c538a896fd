"""What the child processes of `pi_runtime.text.sandbox` share: their limits, and how they are asked.

A child is started as a file, isolated and without site packages:

    python -I -S -B CHILD.py SECONDS MEMORY_BYTES OUTPUT_BYTES PATH…

PATH are this folder and those of the libraries that the child needs. It imports them, confines itself, writes a
newline, and only then reads: a request is a line, and so is the JSON of its reply. It ends with its input.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

if sys.platform != "win32":
    import resource


def serve(reply_to: Callable[[bytes], dict[str, Any] | None], *, has_files: bool) -> None:
    """Confine this process, and reply to each line; None is no reply."""
    seconds = float(sys.argv[1])
    confine(seconds, int(sys.argv[2]), has_files=has_files)
    sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        allow_time(seconds)
        reply = reply_to(line)
        if reply is not None:
            sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
            sys.stdout.buffer.flush()


def confine(seconds: float, memory_bytes: int, *, has_files: bool = False) -> None:
    """Limit this process in time and memory; unless `has_files`, it can open no files and start no processes either."""
    if sys.platform != "win32":
        time.tzset()  # reads the zone file that strftime_now needs
        allow_time(seconds)
        limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, memory_bytes)]
        if not has_files:  # the standard streams, nothing more
            limits += [(resource.RLIMIT_NPROC, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 3)]
        for limit, value in limits:
            # A system that refuses one limit, as macOS does, keeps the others.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, (value, value))


def allow_time(seconds: float) -> None:
    """Let this process compute so long from now on. The parent's clock comes first; this one works without it."""
    if sys.platform != "win32":
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(time.process_time() + seconds) + 1
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
