"""Compare: how several machines would run the same model."""

from collections.abc import Sequence
from typing import Any

from pi_compile.planning.forecast import PlanSpec, plan
from pi_runtime.errors import DoesNotFitError


def compare(specs: Sequence[PlanSpec]) -> dict[str, Any]:
    """The plan of each machine; where the model does not fit, the budget and the reason.

    Raises what `plan` does, DoesNotFitError only where the model fits no machine.
    """
    found: list[dict[str, Any]] = []
    for spec in specs:
        try:
            found.append({"fits": True, **plan(spec)})
        except DoesNotFitError as error:
            if spec is specs[-1] and not any(one["fits"] for one in found):
                raise
            budgets = {"vram_bytes": spec.vram, "ram_bytes": spec.ram}
            found.append({"machine": spec.machine.name, "fits": False, **budgets, "why": error.what})
    return {"machines": found}
