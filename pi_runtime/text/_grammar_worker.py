"""The child process of `pi_runtime.text.grammar_check`: says what is wrong with a grammar.

Started as `_confined.py` says, with the folder of llguidance. A request is {"kind": …, "source": …}, the reply
{"text": message}, which is empty for a good grammar.
"""

import json
import sys
from typing import Any

if __name__ == "__main__":  # isolated mode knows only the standard library
    sys.path += sys.argv[4:]

from _confined import serve  # type: ignore[import-not-found]  # a file beside this one
from llguidance import LLMatcher

READ = {
    "json-schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


def reply_to(request: bytes) -> dict[str, Any]:
    """The reply to one request."""
    asked = json.loads(request)
    return {"text": LLMatcher.validate_grammar(READ[asked["kind"]](asked["source"]))}


if __name__ == "__main__":
    serve(reply_to, has_files=True)
