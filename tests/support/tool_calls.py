"""Calls of tools as models write them."""

import itertools
import json
import random
from typing import Any

from pi_runtime.engine.tools.formats import (
    GEMMA_4,
    GLM_4_5,
    GLM_4_7,
    HERMES,
    LLAMA_3,
    MISTRAL,
    MISTRAL_CALL_ID,
    MISTRAL_LIST,
    NEMOTRON_V2,
    PYTHON,
    QWEN_3_CODER,
    Pairs,
    ToolFormat,
)

FORMATS = [
    *(HERMES, LLAMA_3, MISTRAL_LIST, NEMOTRON_V2, MISTRAL, MISTRAL_CALL_ID, GLM_4_5, GLM_4_7, QWEN_3_CODER, PYTHON),
    GEMMA_4,
]


def written(tools: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model writes them."""
    bodies = [json.dumps({"name": name, tools.arguments: found}, ensure_ascii=False) for name, found in calls]
    if tools is HERMES:
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if tools.pairs:
        return tools.gap.join(f"{tools.trigger}{_paired(tools.pairs, *call)}{tools.end}" for call in calls)
    if tools is GEMMA_4:
        return "".join(f"{tools.trigger}call:{name}{marked(found)}{tools.end}" for name, found in calls)
    if tools is LLAMA_3:
        return "; ".join(bodies)
    if tools in (MISTRAL_LIST, NEMOTRON_V2, PYTHON):  # in JSON, as a grammar makes them
        return f"{tools.trigger}[{', '.join(bodies)}{tools.end}"
    call_id = "[CALL_ID]a1b2c3d4e" if tools is MISTRAL_CALL_ID else ""
    return "".join(f"[TOOL_CALLS]{name}{call_id}[ARGS]{json.dumps(found)}" for name, found in calls)


def marked(value: Any) -> str:
    """A value as Gemma 4's template writes it."""
    if isinstance(value, str):
        return f"{GEMMA_4.quote}{value}{GEMMA_4.quote}"
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return f"{{{','.join(f'{key}:{marked(own)}' for key, own in pairs)}}}"
    return f"[{','.join(map(marked, value))}]" if isinstance(value, list) else json.dumps(value)


def _paired(pairs: Pairs, name: str, arguments: dict[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    written = [
        f"{pairs.before_key}{k}{pairs.after_key}{pairs.before_value}{v}{pairs.after_value}" for k, v in texts.items()
    ]
    return f"{pairs.before_name}{name}{pairs.after_name}{''.join(written)}{pairs.after_all}"


def cuts_of(text: str) -> list[list[str]]:
    """The text whole, in letters, and in random parts."""
    rng = random.Random(text)
    at = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(6))})
    return [[text], list(text), [text[a:b] for a, b in itertools.pairwise(at)]]
