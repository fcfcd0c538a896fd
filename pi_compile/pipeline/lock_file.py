"""Locks: `NAME.lock` beside `NAME.toml` holds every placement of a recipe, so that anyone can recompute and compare.

A lock is TOML in one spelling: digests of all inputs, then for each budget the placement, a line a layer. Placements
with rows on disk have their budget of RAM too.
"""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pi_compile.files import parse_toml
from pi_compile.pipeline.recipe_placement import Placed
from pi_compile.placement import Placement
from pi_runtime.errors import NotMetError, UsageError

LOCK_VERSION = 1
_SHOWN = 40
"""Differences that a message lists."""


def lock_path(recipe: Path) -> Path:
    """The path of a recipe's lock."""
    return recipe.with_suffix(".lock")


def lock_text(placed: Placed) -> str:
    """The lock's content."""
    lines = [
        "# Written by `pi-compile place RECIPE --lock`; `--locked` recomputes it and compares.",
        f"version = {LOCK_VERSION}",
        f'solver = "pi-toolchain {version("pi-toolchain")}"',
        "",
        "[inputs]",
        *(f'{name} = "{digest}"' for name, digest in placed.inputs.items()),
    ]
    for placement in placed.placements:
        lines += ["", "[[plan]]", *_plan_lines(placement)]
    return "\n".join(lines) + "\n"


def _plan_lines(p: Placement) -> Iterator[str]:
    plan = p.plan
    yield f'objective = "{plan.objective}"'
    yield f"vram_bytes = {plan.vram_bytes}"
    if p.rows:
        yield f"ram_budget_bytes = {p.ram}"
        yield f"read_bytes = {p.read_bytes}"
    yield f"used_bytes = {plan.used_bytes}"
    yield f"ram_bytes = {plan.ram_bytes}"
    yield f"context = {plan.context}"
    yield f"predicted_ns = {plan.predicted_ns}"
    yield f'embedding = "{plan.embedding}"'
    yield f'head = "{plan.head}"'
    yield f"gpu = {_inline(p.gpu_bytes)}"
    yield f"ram = {_inline(p.ram_bytes)}"
    yield "layers = ["
    experts = len(plan.cuts) // len(plan.attention)
    for n, (side, time) in enumerate(zip(plan.attention, p.time.layers, strict=True)):
        cuts = plan.cuts[n * experts : (n + 1) * experts]
        cut = f"cuts = {list(cuts)}" if experts > 1 else f"cut = {cuts[0]}"
        yield f'    {{ attention = "{side}", {cut}{_rows_text(p, n)}, ps = {time.total} }},'
    yield "]"
    yield f'digest = "{plan.digest}"'


def _rows_text(p: Placement, layer: int) -> str:
    """How a layer's rows are divided, where some are on disk."""
    if not p.rows:
        return ""
    row = p.rows[layer]
    return f", pinned = {row.pinned}, cached = {row.cached}, first = {str(row.first).lower()}"


def _inline(values: Mapping[str, int]) -> str:
    return "{ " + ", ".join(f"{name} = {value}" for name, value in values.items()) + " }"


def check_lock(path: Path, placed: Placed) -> None:
    """Compare a lock with recomputed placements; the release that wrote it does not matter.

    Raises UsageError without a lock, NotMetError with the differences, layer by layer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        remedy = f"pi-compile place {path.with_suffix('.toml')} --lock"
        raise UsageError(f"{path}: no lock, or not a readable one", remedy=remedy) from None
    now = lock_text(placed)
    if _without_solver(text) == _without_solver(now):
        return
    try:
        found = list(_differences(parse_toml(text), parse_toml(now)))
    except ValueError as error:
        found = [f"not TOML: {error}"]
    found = found or ["spelled differently"]
    more = [f"… and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    raise NotMetError(
        f"{path}: the placement is not the locked one (locked → recomputed)",
        found="".join(f"\n    {line}" for line in (*found[:_SHOWN], *more)),
        remedy="see what changed; if the change is meant, write the lock again (pi-compile place --lock) and commit it",
    )


def _without_solver(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("solver = ")]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in ("version", "inputs"):
        yield from _compare(name, old.get(name), new.get(name))
    before, after = _plans(old), _plans(new)
    for budget in sorted({*before, *after}):
        vram, ram = budget
        label = f"plan for {vram} bytes" + (f" and {ram} bytes of RAM" if ram else "")
        if budget not in before or budget not in after:
            yield f"{label}: {'new' if budget in after else 'gone'}"
            continue
        yield from _compare(label, before[budget], after[budget])


def _plans(lock: Mapping[str, Any]) -> dict[tuple[int, int], Any]:
    """The plans of a lock by their budgets of GPU memory and RAM. Who edits a lock by hand may leave anything in it."""
    plans = lock.get("plan", [])
    tables = [p for p in plans if isinstance(p, dict)] if isinstance(plans, list) else []
    budgets = [(p.get("vram_bytes"), p.get("ram_budget_bytes", 0)) for p in tables]
    return {
        (vram, ram): plan
        for (vram, ram), plan in zip(budgets, tables, strict=True)
        if isinstance(vram, int) and isinstance(ram, int)
    }


def _compare(label: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            yield from _compare(f"{label}, {name}", old.get(name), new.get(name))
    elif isinstance(old, list) and isinstance(new, list):
        yield from _compare_layers(label, old, new)
    elif old != new:
        yield f"{label}: {_short(old)} → {_short(new)}"


def _compare_layers(label: str, old: Sequence[Any], new: Sequence[Any]) -> Iterator[str]:
    if len(old) != len(new):
        yield f"{label}: {len(old)} → {len(new)}"
    for n, (a, b) in enumerate(zip(old, new, strict=False)):
        yield from _compare(f"{label.removesuffix('s')} {n}", a, b)


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:16]}…"
