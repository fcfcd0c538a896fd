"""Running `pi-compile` in another process, and what every message to a user has in common."""

import os
import subprocess
import sys
import textwrap
from typing import Any

USAGE, INPUT, FIT, INTERRUPTED = 2, 3, 4, 130


def assert_a_message(err: str) -> None:
    """An error in the user's terms, and nothing else."""
    assert "error: " in err
    assert "internal error" not in err
    assert "Traceback" not in err


def child(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """`script`, then `pi-compile ARGUMENTS`, in another process."""
    code = f"{textwrap.dedent(script)}\nfrom pi_compile.cli.main import main\nmain()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
