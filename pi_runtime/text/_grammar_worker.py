"""The child process of `pi_runtime.text.grammar_check`: says what is wrong with a grammar, and what it takes.

Started as `_confined.py` says, with the folder of llguidance. A request is {"kind": …, "source": …}, the reply
{"text": message, "nbytes": memory}; the message is empty for a good grammar. A grammar is not only read: its lexer is
built, and it is followed for a while, as a model whose tokens are bytes would follow it. What costs too much there
would cost it elsewhere too.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # isolated mode knows only the standard library
    sys.path += sys.argv[4:]

from _confined import serve  # type: ignore[import-not-found]  # a file beside this one
from llguidance import LLMatcher, LLTokenizer

READ = {
    "json-schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}
BYTES = LLTokenizer("byte")
MARKER = 256
"""A token of it that is no byte. It stands for all of the model's that a grammar asks for by their numbers."""
FOLLOWED = 24
"""Tokens for which a grammar is followed, on each of two ways."""
FORCED_BYTES = 8192
"""Longest text that alone may follow: each token looks at all that is left of it."""
MOST_BYTES = 32 << 20
"""What a grammar may take in memory: every answer that waits or runs may have one of its own."""
STATM = Path("/proc/self/statm")
PAGE_BYTES = 4096
WAYS: tuple[Callable[[Iterable[int]], int], ...] = (min, max)


def reply_to(request: bytes) -> dict[str, Any]:
    """The reply to one request."""
    asked, before = json.loads(request), held_bytes()
    source = asked["source"]
    if asked["kind"] == "lark":
        source = re.sub(r"<\[\d+\]>", f"<[{MARKER}]>", source)
    matcher = LLMatcher(BYTES, READ[asked["kind"]](source), log_level=0)
    if matcher.is_error():
        return {"text": matcher.get_error() or "it cannot be read", "nbytes": 0}
    text = next(filter(None, (problem(matcher.deep_copy(), way) for way in WAYS)), "")
    nbytes = held_bytes() - before
    if nbytes > MOST_BYTES:
        text = text or f"it takes {nbytes} bytes of memory"
    return {"text": text, "nbytes": nbytes}


def held_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    return int(STATM.read_text().split()[1]) * PAGE_BYTES if STATM.exists() else 0


def problem(matcher: Any, way: Callable[[Iterable[int]], int]) -> str:
    """What goes wrong where a grammar is followed by the first or the last of the characters that may come."""
    for _ in range(FOLLOWED):
        if len(matcher.compute_ff_bytes()) > FORCED_BYTES:
            return f"a text of more than {FORCED_BYTES} bytes is the only one that may follow"
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return "it becomes too complex within the first tokens"
        allowed = [token for token in range(MARKER + 1) if bits >> token & 1]
        if matcher.is_stopped() or not allowed:
            break
        # White space often leads nowhere.
        matcher.consume_token(way([token for token in allowed if 0x20 < token < 0x7F] or allowed))
    return ""


if __name__ == "__main__":
    serve(reply_to, has_files=True)
