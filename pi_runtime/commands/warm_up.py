"""Getting a model's kernels ready: loaded, or on a machine's first run compiled by two processes, with a bar.

This process compiles what a step calls first, from the outermost function inwards, and the other from the innermost
outwards. Both save to the kernel cache and load what the other has saved, so that they meet in the middle.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pi_runtime import console
from pi_runtime.engine.model import Model
from pi_runtime.kernels.codegen.indirect_calls import watched
from pi_runtime.kernels.codegen.jit import is_cold

_SECOND = """
import gc
gc.disable()
import pi_runtime.kernels.forward
from pi_runtime.kernels.codegen.indirect_calls import compile_all
compile_all()
"""


def warm_up(model: Model) -> None:
    """Get ready what a generation of the model will run; says so where that takes long."""
    if is_cold():
        console.say("compiling kernels for this processor, once …")
        with _second_compiler(), console.progress("compiling", "kernels") as bar, watched(bar):
            model.warm_up()
    else:
        model.warm_up()
    if not gc.isenabled():  # a command switches it off for its start; what is there by now stays
        gc.freeze()
        gc.enable()


@contextmanager
def _second_compiler() -> Iterator[None]:
    """Compile in another process meanwhile, where there is a processor for it."""
    if os.cpu_count() == 1:
        yield
        return
    # -P: nothing is imported from the working folder.
    command = [sys.executable, "-P", "-c", _SECOND]
    second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        second.kill()
        second.wait()
