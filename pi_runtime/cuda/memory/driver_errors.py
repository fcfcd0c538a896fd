"""A GPU's own errors in words of a user: torch, Triton and cuBLAS raise RuntimeErrors only their text tells apart."""

from collections.abc import Iterator
from contextlib import contextmanager

from pi_runtime.errors import DeviceError, DoesNotFitError, PiError

_FULL = ("out of memory", "ALLOC_FAILED")
_OURS = ("CUDA", "CUBLAS")


@contextmanager
def in_words_of_a_user() -> Iterator[None]:
    """Raise the GPU's errors as ones that say what happened and what to do; others pass."""
    try:
        yield
    except RuntimeError as error:
        known = _known(str(error))
        if known is None:
            raise
        raise known from error


def _known(text: str) -> PiError | None:
    """None for an error that the GPU has no part in."""
    if any(word in text for word in _FULL):
        return out_of_memory(text)
    if any(word in text for word in _OURS):
        # Once it has failed, every later call of this process fails too.
        return PiError(
            "the GPU failed",
            found=_line(text),
            remedy="run again; if it comes back, --device cpu; the driver's own message is in the system log",
        )
    return None


def out_of_memory(found: str) -> DoesNotFitError:
    """The error for a GPU whose memory did not suffice after all."""
    return DoesNotFitError(
        "the GPU ran out of memory",
        found=_line(found),
        remedy="a smaller --vram-budget (a smaller part of the model goes there), a smaller --ctx-size, or end other "
        "programs that use the GPU",
    )


def not_pinned(nbytes: int, error: Exception) -> DoesNotFitError:
    """The error for RAM that the driver would not lock for the GPU's copies."""
    return DoesNotFitError(
        f"{nbytes} bytes of RAM could not be pinned for copies to and from the GPU",
        found=_line(str(error)),
        remedy="end other programs, or raise the limit of locked memory (ulimit -l)",
    )


def no_device(index: int, error: Exception) -> DeviceError:
    """The error for a GPU that is there and cannot be used: its driver is too old, or Triton cannot build what starts
    kernels."""
    built = not isinstance(error, RuntimeError) or "compiler" in str(error)
    return DeviceError(
        f"cuda:{index} cannot be used" + (": Triton could not compile its launcher" if built else ""),
        found=_line(str(error)),
        remedy="install a C compiler and Python's headers (gcc, python3-dev), or --device cpu"
        if built
        else "an NVIDIA driver that suits this torch (see nvidia-smi), or --device cpu",
    )


def _line(text: str) -> str:
    return text.strip().partition("\n")[0]
