"""Programs of others, run against real servers: `nox -s conformance` has them. Without them there is nothing here."""

from importlib.util import find_spec

if any(find_spec(name) is None for name in ("llm_comply", "schemathesis", "lm_eval", "starlette")):
    collect_ignore_glob = ["*"]
