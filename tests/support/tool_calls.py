"""Calls of tools as models write them."""

import json
from typing import Any

from pi_runtime.engine.tools.formats import (
    GLM_4_5,
    GLM_4_7,
    HERMES,
    LLAMA_3,
    MISTRAL,
    MISTRAL_CALL_ID,
    MISTRAL_LIST,
    ToolFormat,
)

FORMATS = [HERMES, LLAMA_3, MISTRAL_LIST, MISTRAL, MISTRAL_CALL_ID, GLM_4_5, GLM_4_7]


def written(tools: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as a model writes them."""
    bodies = [json.dumps({"name": name, tools.arguments: found}, ensure_ascii=False) for name, found in calls]
    if tools is HERMES:
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if tools.has_pairs:
        return tools.gap.join(_paired(tools.gap, *call) for call in calls)
    if tools is LLAMA_3:
        return "; ".join(bodies)
    if tools is MISTRAL_LIST:
        return f"[TOOL_CALLS][{', '.join(bodies)}]"
    call_id = "[CALL_ID]a1b2c3d4e" if tools is MISTRAL_CALL_ID else ""
    return "".join(f"[TOOL_CALLS]{name}{call_id}[ARGS]{json.dumps(found)}" for name, found in calls)


def _paired(gap: str, name: str, arguments: dict[str, Any]) -> str:
    texts = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
    pairs = [f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in texts.items()]
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"
