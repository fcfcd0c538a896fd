"""Kills a worker of another process's making, and nobody else."""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pi_compile.workers.worker import lives_here


def kill_worker(shown: Mapping[str, Any]) -> bool:
    """Kill the process that a worker's file tells of; False where it has ended, whoever has its number now."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(shown["pid"])
        try:
            if lives_here(shown):  # and so it is the one that was opened
                signal.pidfd_send_signal(process, signal.SIGKILL)
                return True
        finally:
            os.close(process)
    return False
