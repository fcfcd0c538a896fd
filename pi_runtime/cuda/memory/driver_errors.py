"""A GPU's own errors in a user's words: the RuntimeErrors of torch, Triton and cuBLAS differ only in their text."""

from collections.abc import Iterator
from contextlib import contextmanager

from pi_runtime.errors import DeviceError, DoesNotFitError, PiError, Setting

_FULL = ("out of memory", "ALLOC_FAILED")
_OURS = ("CUDA", "CUBLAS")


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise the GPU's errors as PiErrors that say what happened and what to do; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        translated = _translated(str(error))
        if translated is None:
            raise
        raise translated from error


def _translated(text: str) -> PiError | None:
    """The error for this text; None where the GPU has no part in it."""
    if any(word in text for word in _FULL):
        return out_of_memory(text)
    if any(word in text for word in _OURS):
        # Every later call of this process fails too.
        return PiError(
            "the GPU failed",
            found=_first_line(text),
            remedy=(
                "run again; if it comes back, ",
                Setting("device", "cpu"),
                "; the driver's own message is in the system log",
            ),
        )
    return None


def out_of_memory(found: str) -> DoesNotFitError:
    """The error for a GPU that ran out of memory in spite of the budget."""
    return DoesNotFitError(
        "the GPU ran out of memory",
        found=_first_line(found),
        remedy=(
            "a smaller ",
            Setting("vram_budget"),
            " (a smaller part of the model goes there), a smaller ",
            Setting("context"),
            ", or end other programs that use the GPU",
        ),
    )


def pinning_error(nbytes: int, error: Exception) -> DoesNotFitError:
    """The error for RAM that the driver does not lock for the GPU's copies."""
    return DoesNotFitError(
        f"{nbytes} bytes of RAM could not be pinned for copies to and from the GPU",
        found=_first_line(str(error)),
        remedy="end other programs, or raise the limit of locked memory (ulimit -l)",
    )


def device_error(index: int, error: Exception) -> DeviceError:
    """The error for a GPU that cannot be used: its driver is too old, or Triton cannot compile what starts kernels."""
    launcher = not isinstance(error, RuntimeError) or "compiler" in str(error)
    return DeviceError(
        f"cuda:{index} cannot be used" + (": Triton could not compile its launcher" if launcher else ""),
        found=_first_line(str(error)),
        remedy=(
            "install a C compiler and Python's headers (gcc, python3-dev)"
            if launcher
            else "an NVIDIA driver that suits this torch (see nvidia-smi)",
            ", or ",
            Setting("device", "cpu"),
        ),
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
