"""The child process of `pi_runtime.text.chat_template`: renders one chat template, as often as it is asked.

Started as `_confined.py` says, with the folders of jinja2 and markupsafe. The first line is {"template": str}, then
comes for each rendering a line {"variables": {…}}. The reply to each is one of

    {"text": str}   {"limit": "memory" | "output"}   {"error": str, "line": int | null}

The environment is the one of transformers' `apply_chat_template` (utils/chat_template_utils.py): the sandbox is the
first wall, the confined process the second.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

if __name__ == "__main__":  # isolated mode knows only the standard library
    sys.path += sys.argv[4:]

# The first three, constants and debug are what jinja2 and its filters would load while rendering, when no file can be
# opened any more.
import encodings.unicode_escape  # noqa: F401
import html  # noqa: F401
import pprint  # noqa: F401

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
from _confined import serve  # type: ignore[import-not-found]  # a file beside this one

MESSAGE_CHARS = 1000


class OutputLimitError(Exception):
    pass


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class Dict:
    """`dict` without the class, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(jinja2.utils.Namespace):
    """`namespace` without underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `namespace(self=…)` is allowed
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute cannot begin with an underscore: {name!r}")


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=Dict(), namespace=Namespace)
    return env


@lru_cache(1)
def compiled(template: str) -> jinja2.Template:
    return environment().from_string(template)


def render(template: str, request: bytes, output_bytes: int) -> dict[str, Any]:
    """The reply to one request."""
    try:
        variables = json.loads(request)["variables"]
        return {"text": "".join(bounded(compiled(template).generate(variables), output_bytes))}
    except MemoryError:
        return {"limit": "memory"}
    except OutputLimitError:
        return {"limit": "output"}
    except jinja2.TemplateError as error:
        return {"error": str(error)[:MESSAGE_CHARS], "line": line_of(error)}
    except Exception as error:  # a template is a program: whatever it raises is its error
        return {"error": f"{type(error).__name__}: {error}"[:MESSAGE_CHARS], "line": line_of(error)}


def bounded(parts: Iterator[str], output_bytes: int) -> Iterator[str]:
    """The parts as long as they stay in the limit, counted in UTF-8."""
    for part in parts:
        output_bytes -= len(part.encode("utf-8", "surrogatepass"))
        if output_bytes < 0:
            raise OutputLimitError
        yield part


def line_of(error: Exception) -> int | None:
    """The template's line that failed; jinja2 has rewritten the traceback to say it."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<template>"]
    return lines[-1] if lines else None


class Renderer:
    """Replies to requests: the first has the template, and no reply."""

    def __init__(self, output_bytes: int) -> None:
        self._output_bytes, self._template = output_bytes, ""
        self._has_template = False

    def __call__(self, request: bytes) -> dict[str, Any] | None:
        if self._has_template:
            return render(self._template, request, self._output_bytes)
        self._template, self._has_template = json.loads(request)["template"], True
        return None


if __name__ == "__main__":
    serve(Renderer(int(sys.argv[3])), has_files=False)
