"""Chat templates of our own, each with one habit that a renderer may overlook."""

from __future__ import annotations

_LOOP = "{%- for m in messages -%}\n"
_END = "{%- endfor -%}\n"
_PROMPT = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
_CALLS = """{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
"""
_MESSAGE = (
    "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}\n" + _CALLS + "{{- '<|im_end|>\\n' -}}\n"
)

OWN_TEMPLATES = {
    "plain": _LOOP + _MESSAGE + _END + _PROMPT,
    "numbers questions, no tool role": """{%- set ns = namespace(asked=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- set ns.asked = ns.asked + 1 -%}
{{- '<|user|>Question ' ~ ns.asked ~ ': ' ~ m.content ~ '<|end|>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant|>' ~ m.content ~ '<|eos|>' -}}
{%- elif m.role == 'system' -%}
{{- '<|system|>' ~ m.content ~ '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""",
    "no tool role": _LOOP
    + "{%- if m.role != 'tool' -%}\n{{- '<|im_start|>' + m.role + '\\n' + m.content + "
    "'<|im_end|>\\n' -}}\n{%- endif -%}\n" + _END + _PROMPT,
    "a word switches the thinking off": "{%- set ns = namespace(off=false) -%}\n"
    + _LOOP
    + "{%- if '/quiet' in m.content -%}{%- set ns.off = true -%}{%- endif -%}\n"
    + "{%- if m.content.startswith('/loud') -%}{%- set ns.off = false -%}{%- endif -%}\n"
    + _MESSAGE
    + _END
    + _PROMPT
    + "{%- if add_generation_prompt and ns.off -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- "
    "endif -%}\n",
    "thinking opened by the prompt": _LOOP
    + "{{- '<|im_start|>' + m.role + '\\n' -}}\n"
    + "{%- if m.role == 'assistant' -%}"
    + "{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}{%- endif -%}\n"
    + "{{- m.content -}}\n"
    + _CALLS
    + "{{- '<|im_end|>\\n' -}}\n"
    + _END
    + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}\n",
    "text or calls": _LOOP
    + "{{- '<|im_start|>' + m.role + '\\n' -}}\n"
    + "{%- if m.tool_calls and not m.content -%}\n"
    + _CALLS
    + "{%- else -%}\n{{- m.content -}}\n{%- endif -%}\n{{- '<|im_end|>\\n' -}}\n"
    + _END
    + _PROMPT,
    "late state": "{%- set ns = namespace(results=0) -%}\n"
    + _LOOP
    + "{%- if m.role == 'tool' -%}{%- set ns.results = ns.results + 1 -%}{%- endif -%}\n"
    + "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}\n"
    + _CALLS
    + "{%- if m.role == 'tool' and ns.results > 15 -%}{{- '\\n' ~ (20 - ns.results) ~ ' left' "
    "-}}{%- endif -%}\n" + "{{- '<|im_end|>\\n' -}}\n" + _END + _PROMPT,
    "calls end the reply": """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user_start|>' + m.content + '<|user_end|>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant_start|>' + m.content -}}
{%- if m.tool_calls -%}
{{- '<|calls|>[' -}}
{%- for c in m.tool_calls -%}
{{- '{"' + c.function.name + '": ' + (c.function.arguments | tojson) + '}' -}}{{- ', ' if not loop.last -}}
{%- endfor -%}
{{- ']<|calls_end|>' -}}
{%- else -%}{{- '<|assistant_end|>' -}}{%- endif -%}
{%- elif m.role == 'tool' -%}{{- '[' + m.content + ']' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
""",  # noqa: E501
    "two parts, each with a stop": """{%- for m in messages -%}
{%- if m.role == 'assistant' and m.reasoning_content -%}
{{- '<|begin|>assistant<|think|>' + m.reasoning_content + '<|end|>' -}}
{%- endif -%}
{{- '<|begin|>' + m.role + '<|content|>' + m.content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|begin|>assistant' -}}{%- endif -%}
""",
    "a line break behind results": """{%- set ns = namespace(told=false) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '\\n' if ns.told else '<|turn|>model\\n' -}}
{%- for c in m.tool_calls or [] -%}
{{- '<tool_call>' + (c.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- m.content | trim -}}
{{- '<|response|>' if m.tool_calls else '<|turn_end|>\\n' -}}
{%- set ns.told = false -%}
{%- elif m.role == 'tool' -%}{{- m.content + '<|response_end|>' -}}{%- set ns.told = true -%}
{%- else -%}{{- '<|turn|>' + m.role + '\\n' + m.content + '<|turn_end|>\\n' -}}{%- set ns.told = false -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.told -%}{{- '<|turn|>model\\n' -}}{%- endif -%}
""",  # noqa: E501
}
