"""Requests as pydantic types, and what is wrong with one as an error in OpenAI's form.

The types are the one list of what the server understands: they check requests, and the OpenAPI document is made of
them. A field that is known and not supported, of OpenAI's or of another server's, allows only values that ask for
nothing: a table of each type has these fields.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, NamedTuple, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticKnownError, core_schema

from pi_runtime.server.errors import ApiError

MOST_NAMED = 10
"""Unknown fields of a request that are named."""
SHOWN_CHARS = 80
SHOWN_MOST = 1000
"""The largest bound of a list or an object that the OpenAPI document has."""
BOUNDS = ("maxItems", "maxProperties")


class AtMost:
    """Bounds a list or an object: a longer one is refused before its items are looked at, and a list at its first
    wrong item. So the errors of a request, which pydantic keeps one by one, are few."""

    def __init__(self, most: int) -> None:
        self.most = most

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        found: dict[str, Any] = {**handler(source)}
        assert found["type"] in ("list", "dict"), found["type"]
        found["max_length"] = self.most
        if found["type"] == "list":
            found["fail_fast"] = True
        return core_schema.no_info_before_validator_function(self._check, cast("CoreSchema", found))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # Who tries every bound that is written there would send a million items.
        found = handler(schema)
        return found if self.most <= SHOWN_MOST else {k: v for k, v in found.items() if k not in BOUNDS}

    def _check(self, value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > self.most:
            kind = "List" if isinstance(value, list) else "Dictionary"
            known = {"field_type": kind, "max_length": self.most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", known)
        return value


TOKENS = AtMost(1 << 20)
"""Bound of lists of tokens. The model's context, which is known later, is a narrower bound."""
MANY = AtMost(1 << 14)
"""Bound of lists and objects whose items are not tokens."""
ModelName = Annotated[
    str | None, Field(description="A name that `/v1/models` gives; another is a 404. Without one the model is meant.")
]

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    AtMost(16),
]


class Unsupported(NamedTuple):
    """A field that is known and not supported: values that ask for nothing beside null, and what a refusal says."""

    allowed: tuple[Any, ...]
    why: str

    def allows(self, value: Any) -> bool:
        """Whether a value asks for nothing. Where false is one 0 is none, though Python has them equal."""
        return value is None or any(isinstance(value, bool) == isinstance(x, bool) and value == x for x in self.allowed)


def unsupported(why: str, *names: str, allowed: tuple[Any, ...] = ()) -> dict[str, Unsupported]:
    """Rows of a table of fields."""
    return dict.fromkeys(names, Unsupported(allowed, why))


def accepted(*names: str) -> dict[str, None]:
    """Rows of a table of fields on which no answer depends."""
    return dict.fromkeys(names)


Known = Mapping[str, Unsupported | None]
OTHER_SERVERS: Known = {
    **unsupported(
        "only 0, which is off",
        *("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "n_indent"),
        allowed=(0,),
    ),
    **accepted("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "cache_prompt", "id_slot"),
    **accepted("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    **unsupported("only 1, which changes nothing", "typical_p", "tfs_z", "length_penalty", allowed=(1,)),
    **unsupported("only -1 or 0, which are off", "top_n_sigma", allowed=(-1, 0)),
    **unsupported("the order of the filters is fixed", "samplers", allowed=("", "edkypmxt", [])),
    **unsupported("only 0, which changes nothing", "min_keep", allowed=(0,)),
    **unsupported("use logprobs", "n_probs", allowed=(0,)),
    **unsupported("use max_tokens", "t_max_predict_ms", allowed=(0, -1)),
    **unsupported("there are no adapters", "lora", allowed=([],)),
    **unsupported("use grammar of /v1/chat/completions", "grammar", "regex", "lark", allowed=("",)),
    **unsupported(
        "use json_schema, regex, lark or grammar of /v1/chat/completions",
        *("json_schema", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ),
    **unsupported(
        "only false, which is off",
        *("use_beam_search", "early_stopping", "include_stop_str_in_output"),
        allowed=(False,),
    ),
    **unsupported("use stop", "stop_token_ids", allowed=([],)),
    **unsupported("special tokens have no text", "skip_special_tokens", allowed=(True,)),
    **unsupported("use logit_bias", "allowed_token_ids", "bad_words", "logits_processors", allowed=([],)),
    **unsupported("a prompt that is too long is a 400", "truncate_prompt_tokens"),
    **unsupported("use echo and logprobs of /v1/completions", "prompt_logprobs"),
}
"""Fields of llama.cpp's server, of vLLM and of others for the settings of answers."""
ONE_ANSWER: Known = {
    **unsupported("there is one answer", "n", allowed=(1,)),
    **unsupported("answers are not compared", "best_of", allowed=(1,)),
    **unsupported("only false, which is off", "echo", allowed=(False,)),
}
"""Fields that ask for several answers or an echo, for forms that give one answer."""


class Body(BaseModel):
    """A JSON object of a request. A value of another type than the field's is an error."""

    known: ClassVar[Known] = {}
    """Fields that are known and not supported, or of no effect, beside those of its bases; None takes every value."""

    # Fields that are not known are taken, for an error of each costs much, and dropped by `of`.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any) -> Any:
        """An object whose fields have 2048 for 2048.0: JSON knows no integers, and some clients write none."""
        whole = {name: int(item) for name, item in _items(value) if _is_whole(item)}
        return {**value, **whole} if whole else value

    @model_validator(mode="before")
    @classmethod
    def _few_unknown(cls, value: Any) -> Any:
        """An object with no more unknown fields than an error or a warning names."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields) + len(cls.all_known()) + MOST_NAMED:
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()} | cls.all_known().keys()
        kept = names.union(islice((name for name in value if name not in names), MOST_NAMED))
        return {name: item for name, item in value.items() if name in kept}

    @classmethod
    @cache
    def all_known(cls) -> Known:
        """The fields that are known here and in its bases, but for those that it has."""
        tables = (vars(base).get("known", {}) for base in reversed(cls.__mro__))
        return {name: row for table in tables for name, row in table.items() if name not in cls.model_fields}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        shown = handler.resolve_ref_schema(found).setdefault("properties", {})
        for name, row in cls.all_known().items():
            said = f"Not supported: {row.why}" if row else "Accepted; no answer depends on it."
            shown[name] = {"description": said, **({"enum": [None, *row.allowed]} if row else {})}
        return found

    @classmethod
    def of(cls, value: object, unknown: list[str] | None = None) -> Self:
        """The request that a JSON value is. Raises ApiError 400 naming the field that is wrong.

        The names of fields that the server does not know come into `unknown`; without it such a field is an error.
        """
        try:
            found = cls.model_validate(value)
        except ValidationError as error:
            raise _api_error(error.errors(include_url=False), value) from None
        names: list[str] = []
        _drop_unknown(found, (), names)
        if unknown is not None:
            unknown += names
        elif names:
            raise ApiError(400, f"{names[0]}: unknown field", param=names[0], code="unknown_parameter")
        return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and abs(value) < 2**53 and value.is_integer()


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, dict) else ()


def invalid(param: str | None, message: str, *, code: str | None = "invalid_value") -> ApiError:
    """The error for a wrong value of a field."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def _api_error(errors: Sequence[ErrorDetails], value: object) -> ApiError:
    """One error for what validation found: that of the innermost field, as others come from branches of unions."""
    found = [(_path(error, value), error) for error in errors]
    path, error = max(found, key=lambda pair: len(pair[0]))  # the first of equals
    if not path:
        return ApiError(400, "the body is not a JSON object", code="invalid_type")
    param = _spelled(path)
    if error["type"] == "missing":
        return invalid(param, "the field is required", code="missing_required_parameter")
    messages = dict.fromkeys(_lowered(other["msg"]) for where, other in found if where == path)
    shown = _beginning(error["input"])
    shown = shown if len(shown) <= SHOWN_CHARS else shown[:SHOWN_CHARS] + "…"
    code = "invalid_type" if error["type"].endswith("_type") else "invalid_value"
    return invalid(param, f"{', or '.join(messages)}; found {shown}", code=code)


def _path(error: ErrorDetails, value: Any) -> tuple[str | int, ...]:
    """Where in the body an error lies: pydantic's location without the names of branches of unions."""
    path: list[str | int] = []
    location = error["loc"]
    names_absent = error["type"] == "missing"
    for n, part in enumerate(location):
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if is_there:
            value = value[part]
        elif not (names_absent and n == len(location) - 1):
            continue
        path.append(part)
    if error["type"].startswith("union_tag"):
        path.append(str(error.get("ctx", {}).get("discriminator", "type")).strip("'"))
    return tuple(path)


def _drop_unknown(value: object, path: tuple[str | int, ...], names: list[str]) -> None:
    """Take the fields out that are not known, here and below, and name the first of them.

    Those that are known and ask for nothing go too. Raises ApiError for one that asks for something.
    """
    if isinstance(value, Body):
        unknown, known = value.__pydantic_extra__ or {}, value.all_known()
        for name in [name for name in unknown if name in known]:
            given, row = unknown.pop(name), known[name]
            if row is not None and not row.allows(given):
                raise invalid(_spelled((*path, name)), f"not supported: {row.why}", code="unsupported_parameter")
        names += [_spelled((*path, name)) for name in islice(unknown, MOST_NAMED - len(names))]
        unknown.clear()
        for name, field in type(value).model_fields.items():
            _drop_unknown(getattr(value, name), (*path, field.alias or name), names)
    elif isinstance(value, list) and value and isinstance(value[0], Body):
        for n, item in enumerate(value):
            _drop_unknown(item, (*path, n), names)


def _spelled(path: Sequence[str | int]) -> str:
    """A path as OpenAI spells it.

    >>> _spelled(["messages", 0, "content"])
    'messages[0].content'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def _beginning(value: Any) -> str:
    """What Python shows of a JSON value, or the beginning of that where it is long.

    >>> _beginning([1, {"a": None}])
    "[1, {'a': None}]"
    """
    if isinstance(value, str):
        return repr(value[: SHOWN_CHARS + 1])
    if isinstance(value, list):
        return f"[{', '.join(map(_beginning, value[:SHOWN_CHARS]))}]"
    if isinstance(value, dict):
        items = islice(value.items(), SHOWN_CHARS)
        return "{" + ", ".join(f"{_beginning(key)}: {_beginning(item)}" for key, item in items) + "}"
    return repr(value)


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
