"""Quantities as the report page writes them."""

from pi_runtime.console import size

GIB = 2**30
NBSP = "\u00a0"
"""Keeps a number and its unit on one line."""


def duration(ps: float) -> str:
    """A time in three digits: 15930000000 → `15.9 ms`."""
    scale, unit = duration_unit(ps)
    return f"{digits(ps / scale)}{NBSP}{unit}"


def duration_unit(ps: float) -> tuple[int, str]:
    """The unit in which a time is easily read: (its picoseconds, its name)."""
    for scale, unit in ((10**12, "s"), (10**9, "ms"), (10**6, "µs")):
        if ps >= scale:
            return scale, unit
    return 10**3, "ns"


def bytes_unit(nbytes: float) -> tuple[int, str]:
    """The unit in which so many bytes are easily read: (its bytes, its name)."""
    return next(((s, u) for s, u in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if nbytes >= s), (1, "B"))


def digits(value: float) -> str:
    """A number in three digits, or all those before the point: `0.0123`, `15.9`, `1,234`."""
    if value == 0:
        return "0"
    places = next((n for n, least in enumerate((100, 10, 1, 0.1, 0.01)) if abs(value) >= least), 5)
    return f"{value:,.{places}f}"


def percent(share: float) -> str:
    """A share in percent: 0.0123 → `1.2 %`; a small one is never shown as 0."""
    if 0 < share < 0.001:
        return f"<{NBSP}0.1{NBSP}%"
    return f"{share * 100:.{0 if share >= 0.1 or share == 0 else 1}f}{NBSP}%"


def memory(nbytes: int) -> str:
    """Bytes in a readable unit, – for none."""
    return "–" if nbytes == 0 else size(nbytes).replace(" ", NBSP)


def span(low: str, high: str) -> str:
    """A range, `30 % to 100 %`, or one value where both are the same."""
    return low if low == high else f"{low} to {high}"
