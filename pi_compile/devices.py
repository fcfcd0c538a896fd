"""Where torch computes."""

from pi_runtime.errors import DeviceError, UsageError


def torch_device(name: str) -> str:
    """`cpu` or `cuda:N`, checked to be there. Raises DeviceError, UsageError."""
    # PI_DEVICE may be set for pi-run, which knows two more.
    if name in ("cpu", "auto", "stand-in"):
        return "cpu"
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index == "" or index.isdecimal()):
        raise UsageError(f"--device {name}: unknown device", expected="cpu or cuda:N")
    import torch  # noqa: PLC0415  seconds to import

    if int(index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"--device {name}: no such GPU", found=f"{torch.cuda.device_count()} CUDA devices", remedy="--device cpu"
        )
    return f"cuda:{index or 0}"
