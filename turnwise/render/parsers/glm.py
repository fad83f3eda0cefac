"""GLM's tags (4.5 and later; Laguna, Ling 3 and Spark write them too), with or without line breaks::

    <think>I look it up.</think>
    <tool_call>look_up
    <arg_key>key</arg_key>
    <arg_value>a</arg_value>
    </tool_call>

Strings are bare text, other values JSON: the tool's JSON schema says which `5` is (see `values.coerce`).
"""

import re

from turnwise.render.parsers.base import CallSyntax, ReasoningMarks, ReplyFormat
from turnwise.render.parsers.readers import TaggedCalls


def _glm_tags(suffix: str, behind_name: str = "") -> TaggedCalls:
    return TaggedCalls(
        re.compile(rf"\A\s*([^\s<]+)\s*{behind_name}"),
        re.compile(rf"\s*<arg_key{suffix}>([^<]*)</arg_key{suffix}>\s*<arg_value{suffix}>"),
        f"</arg_value{suffix}>",
        "",
        f"NAME{behind_name}<arg_key{suffix}>KEY</arg_key{suffix}><arg_value{suffix}>VALUE</arg_value{suffix}>",
    )


GLM = ReplyFormat("glm", (CallSyntax("<tool_call>", _glm_tags(""), "</tool_call>"),))

_HY = ":opensource"
HUNYUAN = ReplyFormat(
    "hunyuan",
    (
        CallSyntax(
            f"<tool_call{_HY}>",
            _glm_tags(_HY, f"<tool_sep{_HY}>"),
            f"</tool_call{_HY}>",
            (f"<tool_calls{_HY}>", f"</tool_calls{_HY}>"),
        ),
    ),
    thinking=ReasoningMarks(f"<think{_HY}>", f"</think{_HY}>"),
)
"""Hunyuan 3: the same in `<tool_calls:opensource>`, with `<tool_sep:opensource>` behind the name."""
