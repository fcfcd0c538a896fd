"""Stands in for pydantic on a machine that has none: `pi_compile`'s profiles and model of time, without their checks.

A GPU that is lent may have no more than torch and what comes with it. Rates that are measured there need no check.
"""

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Self, get_args, get_type_hints


class BaseModel:
    """Fields by keyword, with the defaults of their class."""

    def __init__(self, **given: Any) -> None:
        for name in self._fields():
            if name not in given and not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no {name}")
            default = getattr(type(self), name, None)
            setattr(self, name, given.get(name, default() if callable(default) else default))

    @classmethod
    def _fields(cls) -> list[str]:
        return [name for c in reversed(cls.__mro__) for name in inspect.get_annotations(c)]

    @classmethod
    def model_validate(cls, data: Mapping[str, Any]) -> Self:
        """Tables become the sections that they stand for."""
        hints = get_type_hints(cls)
        return cls(**{name: _section(hints[name], value) for name, value in data.items()})

    def model_dump(self, exclude: set[str] | None = None) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self._fields() if name not in (exclude or ())}
        return {name: v.model_dump() if isinstance(v, BaseModel) else v for name, v in values.items()}


def _section(hint: Any, value: Any) -> Any:
    kinds = [k for k in (hint, *get_args(hint)) if isinstance(k, type) and issubclass(k, BaseModel)]
    return kinds[0].model_validate(value) if kinds and isinstance(value, Mapping) else value


def _field(default_factory: Callable[[], Any] | None = None, **_limits: Any) -> Any:
    return default_factory


def _as_it_is(*_names: str, **_options: Any) -> Callable[[Any], Any]:
    return lambda function: function


def install() -> None:
    """Be pydantic where there is none."""
    if find_spec("pydantic") is not None:
        return
    module: Any = types.ModuleType("pydantic")
    module.BaseModel, module.ConfigDict, module.Field = BaseModel, dict, _field
    module.field_validator = module.model_validator = module.model_serializer = _as_it_is
    module.SerializerFunctionWrapHandler, module.ValidationError = Any, ValueError
    sys.modules["pydantic"] = module
