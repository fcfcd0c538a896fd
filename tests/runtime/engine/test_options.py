"""Options have one spelling of their names and defaults, in Python and on the command line."""

import inspect
import warnings
from dataclasses import asdict

import pytest

from pi_runtime import Engine, load
from pi_runtime.commands.options import ENGINE_FLAGS, FILE_FLAGS, MODEL_FLAGS, SamplingOptions
from pi_runtime.engine.options import EngineOptions, ModelOptions
from pi_runtime.errors import UsageError
from pi_runtime.sequence.sampling import Sampling


def defaults(function: object) -> dict[str, object]:
    """The keywords of a function with their defaults."""
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_load_takes_the_options_of_a_model() -> None:
    assert defaults(load) == {**asdict(ModelOptions()), "progress": None}


def test_an_engine_takes_its_options() -> None:
    assert defaults(Engine) == {**asdict(EngineOptions()), "kv_budget": None, "say": warnings.warn}


def test_every_option_of_a_model_has_a_flag() -> None:
    assert MODEL_FLAGS.keys() == asdict(ModelOptions()).keys()
    assert ENGINE_FLAGS.keys() | {"decode_share"} == asdict(EngineOptions()).keys()
    assert FILE_FLAGS.keys() <= MODEL_FLAGS.keys() | ENGINE_FLAGS.keys()


def test_every_way_to_draw_tokens_has_a_flag() -> None:
    assert asdict(SamplingOptions()).keys() | {"number"} == asdict(Sampling()).keys()


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"piece": 0}, {"decode_share": 1.0}], ids=str)
def test_impossible_options(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError) as caught:
        EngineOptions(**wrong)  # type: ignore[arg-type]
    assert caught.value.setting is not None
    assert caught.value.setting.name in wrong
