"""Examples of docstrings as blocks of code: Markdown would take `>>>` for three quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> (?:.+\n?)+", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around each paragraph that begins with a prompt."""

    def on_object(self, *, obj: griffe.Object, **_options: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )
