"""Small chat templates in the shapes of published ones."""

# ruff: noqa: E501  templates are broken where they read well

from collections.abc import Mapping, Sequence
from typing import Any

from pi_runtime.text.chat_template import ChatTemplate, SandboxLimits

TURN = "{% for m in messages %}"
END = "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}"
ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role in ('user', 'assistant') and m.tool_calls is not defined %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
CHATML = (
    TURN + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + END + PROMPT + "<|im_start|>assistant\n{% endif %}"
)
"""No tools, and any role."""
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TURN
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n" + END + "<start_of_turn>model\n"
)
"""Neither system nor tools, and roles in turns."""
TYPED = (
    TURN
    + "<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    + "{% endfor %}<|im_end|>\n"
    + END
    + "<|im_start|>assistant\n"
)
"""Content is parts."""
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}" + TURN + "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls %}\n<tool_call>\n"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"""
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}" + END + PROMPT + "<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Calls as Hermes has them, thoughts of the last turn, a switch; fails without content."""
LLAMA = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{{ system }}<|eot_id|>"
    "{% if tools is not none %}{% if not messages %}{{ raise_exception('no first user message') }}{% endif %}"
    "<|start_header_id|>user<|end_header_id|>\n\n{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}"
    "{{ messages[0].content }}<|eot_id|>{% set messages = messages[1:] %}{% endif %}"
    + TURN
    + "{% if m.role in ('tool', 'ipython') %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    """{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot_id|>"""
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    + END
    + PROMPT
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""One call a message, whose text is dropped; any role."""
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    + ALTERNATES
    + "<s>"
    + TURN
    + ""
    "{% if m.role == 'user' %}{% if tools is not none and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    """{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last }}{% endfor %}]</s>"""
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    """[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]"""
    "{% else %}{{ raise_exception('no such role') }}{% endif %}" + END
)
"""Ids of nine letters, roles in turns, the system message in the last question."""
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% if messages[0].role in ('system', 'developer') %}{% set told = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if told or tools %}<|start|>developer<|message|>{{ told }}{% if tools %}namespace functions {\n"
    "{% for t in tools %}{{ '// ' + t.function.description }}\ntype {{ t.function.name }} = (_: { "
    "{% for name, p in t.function.parameters.properties.items() %}{{ name + ': ' + p.type }},{% endfor %}}) => any;\n"
    "{% endfor %}} // namespace functions{% endif %}<|end|>{% endif %}{% set ns = namespace(name=none) %}"
    + TURN
    + "{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}{% set later = namespace(final=false) %}"
    "{% for l in messages[loop.index:] %}{% if l.role == 'assistant' and 'tool_calls' not in l %}"
    "{% set later.final = true %}{% endif %}{% endfor %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}"
    "{% elif (m.content or m.thinking) and not later.final %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>{% set ns.name = f.name %}"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set ns.name = none %}{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.name is none %}{{ raise_exception('no call before') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
    + END
    + PROMPT
    + "<|start|>assistant{% endif %}"
)
"""Channels, the first of several calls, text or thoughts beside it; tools must have a description and properties."""
DEEPSEEK = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    + TURN
    + "{% if m.role == 'user' %}<User>{{ m.content }}{% elif m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name + '\n' + c.function.arguments }}</call>{% endfor %}"
    "{% elif m.role == 'assistant' %}<Assistant>{{ m.content.split('</think>')[-1] }}<end>"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>{% endif %}"
    + END
    + PROMPT
    + "<Assistant><think>\n{% endif %}"
)
"""Calls where content is null, arguments as text, the last system message, no tools."""
GLM = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    + TURN
    + "{% if m.role == 'assistant' %}<|assistant|>{% if m.content is defined %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}{% elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}" + END + PROMPT + "<|assistant|>{% endif %}"
)
"""Pairs of keys and values; writes a content that is None."""
HERMES = (
    "<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> Write <tool_call>\n"
    """{"name": <name>, "arguments": <args>}\n</tool_call><|im_end|>\n"""
    + TURN
    + "{% if m.role == 'tool' %}<|im_start|>tool\n<tool_response>\n{{ m.content }}\n</tool_response>\n<|im_end|>\n"
    "{% elif m.tool_calls is defined %}<|im_start|>assistant{% for c in m.tool_calls %}\n<tool_call>\n"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"""
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    + END
    + PROMPT
    + "<|im_start|>assistant\n{% endif %}"
)
"""Goes through the tools though there are none."""
APRIEL = (
    "{% if tools %}Return calls within <tool_call></tool_call> tags, with name and arguments:\n"
    """<tool_calls>[{"name": <name>, "arguments": <args>}]</tool_calls>{{ tools | string }}{% endif %}"""
    + TURN
    + "<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}<tool_calls>[{% for c in m.tool_calls %}"
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]</tool_calls>"""
    "{% endif %}<|end|>" + END + PROMPT + "<|assistant|>{% endif %}"
)
"""Speaks of tags that it does not write."""
ALL = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "typed": TYPED,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
    "glm": GLM,
    "hermes": HERMES,
    "apriel": APRIEL,
}


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    limits: SandboxLimits = SandboxLimits(),
) -> str:
    """Render one prompt by a template that is not kept."""
    with ChatTemplate(template, limits) as kept:
        return kept.render(messages, variables=variables, add_generation_prompt=add_generation_prompt)
