"""Trying a grammar in a process of its own, before it is compiled in this one.

llguidance limits most of what a grammar may cost, but not the time in which it finds out whether a regular expression
can match at all: intersections of a few patterns take hours. So a grammar of somebody else is read by a child first
(`_grammar_worker.py`), in bounded time and memory. Where the system has no `resource` module (Windows), memory is not
bounded.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pi_runtime.errors import UsageError
from pi_runtime.exit_codes import missing_extra
from pi_runtime.text.chat_template import kept_variables
from pi_runtime.text.grammar import Grammar
from pi_runtime.text.kept import Kept

CHILD = Path(__file__).with_name("_grammar_worker.py")
DIGEST_BYTES = 32
_known = Kept[bytes, None](256 * DIGEST_BYTES)
"""Digests of grammars that were found to be good, and are not tried again."""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    """Limits of one trial."""

    seconds: float = 5.0
    """Wall time, the start of the process included."""
    memory_bytes: int = 1 << 30
    """Address space of the child, Python included."""


def check_grammar(grammar: Grammar, limits: GrammarLimits = GrammarLimits()) -> None:
    """Raise UsageError for a grammar that is none, or takes more than the limits to find out."""
    digest = hashlib.sha256(repr((grammar, limits)).encode("utf-8", "surrogatepass")).digest()
    _known.get(digest, DIGEST_BYTES, lambda: _try(grammar, limits))


def _try(grammar: Grammar, limits: GrammarLimits) -> None:
    spec = importlib.util.find_spec("llguidance")
    if spec is None or spec.origin is None:
        raise missing_extra("llguidance") or ModuleNotFoundError("llguidance")
    numbers = (str(limits.seconds), str(limits.memory_bytes))
    command = [sys.executable, "-I", "-S", "-B", str(CHILD), *numbers, str(Path(spec.origin).parents[1])]
    request = json.dumps({"kind": grammar.kind, "source": grammar.source}).encode()
    try:
        done = subprocess.run(
            command,
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.seconds,
            env=kept_variables(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        expected = f"one that can be read within {limits.seconds:g} s"
        raise UsageError("too complex", setting=grammar.setting, expected=expected) from None
    if done.returncode:
        expected = f"one that can be read in {limits.memory_bytes} bytes"
        raise UsageError("too complex", setting=grammar.setting, expected=expected)
    if done.stdout:
        found = done.stdout.decode(errors="replace").strip()[:500]
        raise UsageError("cannot be used", setting=grammar.setting, found=found)
