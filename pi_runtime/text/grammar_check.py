"""Trying a grammar in a process of its own, before it is compiled in this one.

llguidance limits most of what a grammar may cost, but not the time in which it finds out whether a regular expression
can match at all: intersections of a few patterns take hours, and a large `multipleOf` ends never. So a grammar of
somebody else is compiled and followed by a child first (`_grammar_worker.py`), in bounded time and memory. A child that
had little to do stays for the next grammar.
"""

import hashlib
import math
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from pi_runtime.errors import PiError, UsageError
from pi_runtime.errors.exit_codes import missing_extra
from pi_runtime.text.grammar import Grammar, LatestValues
from pi_runtime.text.sandbox import Sandbox, SandboxEndedError, SandboxLimitError, SandboxLimits, SandboxStartError

CHILD = Path(__file__).with_name("_grammar_worker.py")
LIMITS = SandboxLimits(seconds=5.0, memory_bytes=1 << 30)
DIGEST_BYTES = 32
IDLE_MOST = 2
"""Children that wait for grammars."""
QUICK_S, LITTLE = 1.0, 2 << 20
"""Time, and bytes, after which a child does not stay: what it was asked may have left much in its memory, of which the
next grammar would seem to take nothing."""
KNOWN_S = 60.0
"""Time for which a refusal is known: a busy machine may have been the reason."""
_known = LatestValues[bytes, tuple[dict[str, str] | int, float]](256 * DIGEST_BYTES)
"""By digests of grammars what is wrong with each, or what it takes, and when it was tried: asked again, none costs."""
_idle: deque[Sandbox] = deque(maxlen=IDLE_MOST)


def check_grammar(grammar: Grammar, limits: SandboxLimits = LIMITS, seconds: float = math.inf) -> int:
    """The bytes that a grammar takes, compiled; 0 where the system does not say.

    Raises UsageError for one that is none, takes too much, or more than the limits to find out; or more `seconds`, if
    these are fewer, which is not known for the next time.
    """
    digest = hashlib.sha256(repr((grammar, limits)).encode("utf-8", "surrogatepass")).digest()
    found, tried_s = _known.get(digest, DIGEST_BYTES, lambda: (_found(grammar, limits, seconds), time.monotonic()))
    if isinstance(found, int):
        return found
    if time.monotonic() - tried_s > KNOWN_S:
        _known.drop(digest)
        return check_grammar(grammar, limits, seconds)
    raise UsageError(setting=grammar.setting, **found)


def _found(grammar: Grammar, limits: SandboxLimits, seconds: float) -> dict[str, str] | int:
    """What is wrong with a grammar, as errors say it, or what it takes."""
    try:
        found = _reply(grammar, limits, seconds)
    except ModuleNotFoundError as error:
        raise missing_extra("llguidance") or error from None
    except SandboxStartError as error:
        raise PiError("the process that reads grammars did not start", found=str(error)) from None
    except (SandboxLimitError, SandboxEndedError) as error:
        is_late = isinstance(error, SandboxLimitError) and error.limit == "time"
        room = f"within {limits.seconds:g} s" if is_late else f"in {limits.memory_bytes} bytes"
        wrong = {"what": "too complex", "expected": f"one that can be read {room}"}
        if is_late and seconds < limits.seconds:
            raise UsageError(setting=grammar.setting, **wrong) from None
        return wrong
    if not found.get("text"):
        return max(0, int(found["nbytes"]))
    return {"what": "cannot be used", "found": found["text"].strip()[:500]}


def _reply(grammar: Grammar, limits: SandboxLimits, seconds: float) -> dict[str, Any]:
    """What a child replies. Raises what `Sandbox.ask` raises, and then the child has ended."""
    child = None
    if limits == LIMITS:
        with suppress(IndexError):
            child = _idle.pop()
    child = child or Sandbox(CHILD, ("llguidance",), limits)
    began, stays = time.monotonic(), False
    try:
        found = child.ask({"kind": grammar.kind, "source": grammar.source}, seconds)
        is_little = time.monotonic() - began < QUICK_S and found.get("nbytes", LITTLE) < LITTLE
        stays = limits == LIMITS and is_little
    finally:
        if stays:
            _idle.append(child)
        else:
            child.close()
    return found
