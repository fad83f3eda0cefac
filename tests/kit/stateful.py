"""Chat templates made up to keep state across turns: counters, flags, windows,
dates, things that move."""

from __future__ import annotations

from hypothesis import strategies as st

_COUNT = (
    "{%- set ns = namespace(users=0, results=0, replies=0, calls=0, found='', told=false, "
    "quiet=false, failed=0) -%}\n"
)
_REPLIES = (
    "{%- set replies = messages | selectattr('role', 'equalto', 'assistant') | list | length -%}\n"
)
_CALLS = """{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor -%}
"""  # noqa: E501
# The number of a call among all calls of the conversation, found by its id.
_NUMBER = """{%- set ns.calls = 0 -%}{%- set ns.found = '' -%}
{%- for one in messages -%}{%- for call in one.tool_calls or [] -%}{%- if call.id == m.tool_call_id and ns.found == '' -%}
{%- set ns.found = ns.calls | string -%}{%- endif -%}{%- set ns.calls = ns.calls + 1 -%}{%- endfor -%}{%- endfor -%}
{{- 'call ' + ns.found + ': ' -}}
"""  # noqa: E501
USER = {
    "round": "{{- '[Round ' + (ns.users | string) + ']\\n' -}}\n",
    "reminder": "{%- if ns.users % 3 == 0 -%}{{- 'Be brief.\\n' -}}{%- endif -%}\n",
    "long": "{%- if messages | length > 7 -%}{{- 'It grows long.\\n' -}}{%- endif -%}\n",
    "used tools": "{%- if ns.results -%}{{- 'You have used tools.\\n' -}}{%- endif -%}\n",
    "system moves": "{%- if messages[0].role == 'system' and loop.last -%}{{- "
    "messages[0].content + '\\n' -}}{%- endif -%}\n",
    "replies": "{{- (ns.replies | string) + ' replies so far\\n' -}}\n",
    "date": "{{- strftime_now('%Y') + '\\n' -}}\n",
    "word": "{%- if '/quiet' in m.content -%}{%- set ns.quiet = true -%}{%- endif -%}\n",
    "length": "{%- if m.content | length > 24 -%}{{- 'A long one.\\n' -}}{%- endif -%}\n",
    "blank": "{%- if not m.content | trim -%}{{- 'Nothing was asked.\\n' -}}{%- endif -%}\n",
    "said before": "{%- if not loop.first and m.content == messages[0].content -%}{{- "
    "'Again.\\n' -}}{%- endif -%}\n",
}
TOOL = {
    "numbered": "{{- '#' + (ns.results | string) + ' ' -}}\n",
    "first": "{%- if not ns.told -%}{{- 'TOOL OUTPUTS\\n' -}}{%- set ns.told = true "
    "-%}{%- endif -%}\n",
    "call ids": _NUMBER,
    "parity": "{{- 'even ' if loop.index0 % 2 else 'odd ' -}}\n",
    "late": "{%- if ns.results > 9 -%}{{- (20 - ns.results) | string + ' left ' -}}{%- endif -%}\n",
    "failed": "{%- if (m.content | lower).startswith('error') -%}{%- set ns.failed = ns.failed "
    "+ 1 -%}{%- endif -%}\n{%- if ns.failed -%}{{- (ns.failed | string) + ' "
    "errors ' -}}{%- endif -%}\n",
    "omits blank": "{{- 'nothing' if not m.content | trim -}}\n",
}
THINKING = {
    "kept": "true",
    "older than two": "replies - ns.replies < 2",
    "older than one": "replies - ns.replies < 1",
    "last only": "loop.last",
}
WINDOWS = {
    "": "true",
    "last five": "loop.index0 >= messages | length - 5",
    "last eight": "loop.index0 >= messages | length - 8",
}


def source(
    user: frozenset[str], tool: frozenset[str], thinking: str, window: str, *, date: bool = False
) -> str:
    """The source of a template with these features, ChatML else."""
    return (
        _COUNT
        + _REPLIES
        + (
            "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' "
            "-}}\n"
            if date
            else ""
        )
        + "{%- for m in messages -%}\n"
        + "{%- if m.role == 'user' -%}{%- set ns.users = ns.users + 1 -%}{%- endif -%}\n"
        + "{%- if m.role == 'tool' -%}{%- set ns.results = ns.results + 1 -%}{%- endif -%}\n"
        + "{%- if m.role == 'assistant' -%}{%- set ns.replies = ns.replies + 1 -%}{%- endif -%}\n"
        + f"{{%- if {WINDOWS[window]} -%}}\n"
        + "{{- '<|im_start|>' + m.role + '\\n' -}}\n"
        + "{%- if m.role == 'user' -%}\n"
        + "".join(USER[name] for name in sorted(user))
        + "{%- elif m.role == 'tool' -%}\n"
        + "".join(TOOL[name] for name in sorted(tool))
        + "{%- elif m.role == 'assistant' and m.reasoning_content is string and "
        f"({THINKING[thinking]}) -%}}\n"
        + "{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}\n"
        + "{%- endif -%}\n{{- m.content -}}\n"
        + _CALLS
        + "{{- '<|im_end|>\\n' -}}\n{%- endif -%}\n{%- endfor -%}\n"
        + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' + ('(quiet) ' if "
        "ns.quiet else '') -}}{%- endif -%}\n"
    )


def sources() -> st.SearchStrategy[str]:
    """Templates with some of these features."""
    return st.builds(
        source,
        st.frozensets(st.sampled_from(sorted(USER)), max_size=2),
        st.frozensets(st.sampled_from(sorted(TOOL)), max_size=2),
        st.sampled_from(sorted(THINKING)),
        st.sampled_from(sorted(WINDOWS)),
        date=st.booleans(),
    )
