"""What a machine would do with a model that is known by its config alone: what fits, where it goes, and how fast."""

from pi_compile.planning.baselines import Baselines
from pi_compile.planning.every_format import every_format
from pi_compile.planning.forecast import (
    AROUND,
    GIB,
    PlanSpec,
    activation_profile,
    compare,
    on_usable_machine,
    plan,
    prefill_tokens_per_s,
    problem_of,
    profile_of_dense,
    published_profile,
    ram_budgets,
)
from pi_compile.planning.model_config import PlannedModel, find_planned
from pi_compile.results.predictor_set import built_activations
