"""Random JSON schemas of many kinds, each of which has short texts that it describes."""

import random
import string
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-z]{2,5}$", "^[A-Z][0-9]{3}$", "^(yes|no|maybe)$", "^a*b?c$", "^[0-9]{4}-[0-9]{2}$", '^[^"\\\\]{1,4}$')
FORMATS = ("date", "ipv4", "uuid")


def random_schema(rng: random.Random) -> Schema:
    """An object or an array whose values are objects, arrays, and scalars of every kind, three levels deep at most."""
    schema = rng.choice([_object, _array])(rng, rng.randint(1, 3))
    if rng.random() < 0.25:
        # One part is named, and referred to.
        schema["$defs"] = {"part": _value(rng, 1)}
        if schema["type"] == "array":
            schema["items"] = {"$ref": "#/$defs/part"}
        else:
            schema["properties"]["ref"] = {"$ref": "#/$defs/part"}
            schema["required"] = [*schema.get("required", []), "ref"]
    if rng.random() < 0.8:
        schema["x-guidance"] = {"whitespace_flexible": False}
    return schema


def _value(rng: random.Random, depth: int) -> Schema:
    scalars = [_string, _integer, _number, _enum, _const, _plain]
    nested = [_object, _array, _tuple, _any_of, _all_of]
    return rng.choice([*scalars, *nested] if depth else scalars)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "a b", 'q"', "x", "tags", "at"], rng.randint(0, 4))
    found: Schema = {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        found["additionalProperties"] = _value(rng, 0)
    if not found["required"]:
        del found["required"]
    return found


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [_value(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-20, 20)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + rng.randint(0, 300)}]}


def _string(rng: random.Random, depth: int) -> Schema:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.5:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.choice([-1000, -7, 0, 1, 42])
    if rng.random() < 0.2:
        return {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": rng.choice([2, 5, 7])}
    return {"type": "integer", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(1, 5000)}


def _number(rng: random.Random, depth: int) -> Schema:
    low = round(rng.uniform(-50, 50), rng.randint(0, 3))
    bound = rng.choice(["maximum", "exclusiveMaximum"])
    return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): low, bound: low + rng.randint(1, 99)}


def _enum(rng: random.Random, depth: int) -> Schema:
    values = ["red", "grün", "", 0, -1.5, True, None, [1, "a"], {"k": 1}, "".join(rng.choices(string.printable, k=4))]
    return {"enum": rng.sample(values, rng.randint(1, 4))}


def _const(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(["fixed", 7, None, False, {"a": [1, 2]}, "línea\n"])}


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", "integer", ["boolean", "null"]])}
