"""Which device a run is on."""

import importlib.util

from pi_runtime.errors import DeviceError, MissingExtraError, UsageError


def resolve_device(name: str) -> str:
    """`auto`, `cpu`, `stand-in` or `cuda:N` → the device to use. Raises DeviceError for one that is not there.

    So far every run is on the CPU, which can also stand in for a GPU; asking for a GPU is refused rather than ignored.
    """
    if name in ("auto", "cpu", "stand-in"):
        return "cpu" if name == "auto" else name
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index == "" or index.isdecimal()):
        raise UsageError(f"--device {name}: unknown device", expected="auto, cpu, stand-in or cuda:N")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError(
            f"--device {name}: needs torch, which is not installed", remedy="pip install 'pi-toolchain[cuda]'"
        )
    import torch  # noqa: PLC0415  heavy, and needed only here

    present = torch.cuda.device_count()
    if int(index or 0) >= present:
        raise DeviceError(
            f"--device {name}: no such GPU", found=f"{present} CUDA devices", remedy="--device cpu, or --device auto"
        )
    raise DeviceError(f"--device {name}: this release computes on the CPU only", remedy="--device cpu")
