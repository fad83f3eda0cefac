"""Any calls, written in any format: they are read back, and a reply cut anywhere has no call
that was not written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwright.renderers.parsers import PARSERS

Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}(?:\.[a-z]+|-[a-z]+)?", fullmatch=True)
WORDS = st.text("abc éz.,!\n", max_size=12).map(str.strip)
# Bare text, with what other formats are made of; only the format's own end tags are left out.
BARE_TEXT = st.text("a5 \n\"'\\{}[]()<>:,|&é\ud83d=/`", max_size=12)
KEYS = {
    "json": st.text(max_size=6),
    "tags": st.text("abz09_$@.- []é", min_size=1, max_size=6).filter(
        lambda key: key == key.strip()
    ),
    "python": st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True),
    "gemma": st.text("abz09_$@.-[]/ é}'<", min_size=1, max_size=6).filter(
        lambda key: key == key.strip()
    ),
}


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def schema_type(value: Any) -> str:
    kinds = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
    }
    return kinds.get(type(value), "null")


def named(key: str, arguments: str) -> Callable[[str, Arguments], str]:
    return lambda name, given: (
        f"{{{dumped(key)}: {dumped(name)}, {dumped(arguments)}: {dumped(given)}}}"
    )


CALL, LLAMA_CALL = named("name", "arguments"), named("name", "parameters")
COHERE_CALL = named("tool_name", "parameters")


def tags(
    call: str, argument: str, end: str, tail: str, newline: str = ""
) -> Callable[[str, Arguments], str]:
    """Return a writer of arguments in tags; `%n` and `%k` are the names in the opening tags, `%t`
    whether it is a string."""

    def write(name: str, given: Arguments) -> str:
        body = "".join(
            argument.replace("%k", key).replace("%t", "true" if isinstance(value, str) else "false")
            + f"{newline}{bare(value)}{newline}{end}\n"
            for key, value in given.items()
        )
        return call.replace("%n", name) + body + tail

    return write


def typed_tags(name: str, given: Arguments) -> str:
    body = "".join(
        f'<|open|>argument key="{key}" '
        f'type="{schema_type(value)}"<|sep|>{bare(value)}<|close|>argument<|sep|>'
        for key, value in given.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{body}<|close|>call<|sep|>'


def literal(value: Any) -> str:
    """Return a value as a Python literal, its strings escaped as in Python."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, str):
        return (
            "'"
            + dumped(value)[1:-1].replace('\\"', '"').replace("'", "\\'").replace("\\/", "/")
            + "'"
        )
    return repr(value)


def python_call(name: str, given: Arguments) -> str:
    return f"{name}({', '.join(f'{key}={literal(value)}' for key, value in given.items())})"


def gemma(quote: str) -> Callable[[str, Arguments], str]:
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{written(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(written, value)) + "]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else dumped(value)

    return lambda name, given: f"call:{name}{written(given)}"


def minicpm(name: str, given: Arguments) -> str:
    body = "".join(
        f'<param name="{key}">'
        + (f"<![CDATA[{value}]]>" if isinstance(value, str) else dumped(value))
        + "</param>"
        for key, value in given.items()
    )
    return f'<function name="{name}">{body}</function>'


@dataclass(frozen=True)
class Written:
    """How a format writes calls."""

    opening: str
    """Mark that begins a call: from its end on, a reply that is cut has one."""
    write: Callable[[str, Arguments], str]
    before: str = ""
    between: str = ""
    after: str = ""
    keys: str = "json"
    values: st.SearchStrategy[Any] = JSON_VALUES
    without: tuple[str, ...] = ()
    """Texts that no argument has, because the format does not escape them."""
    text: bool = True
    """Whether a text may stand before the calls."""
    thinking: tuple[str, str] = ("<think>", "</think>")

    def reply(self, calls: Calls, text: str) -> str:
        return (
            text
            + self.before
            + self.between.join(self.write(name, given) for name, given in calls)
            + self.after
        )


def each(opening: str, write: Callable[[str, Arguments], str], close: str, **more: Any) -> Written:
    """Return a format in which each call has marks of its own."""
    return Written(opening, lambda name, given: opening + write(name, given) + close, **more)


def listed(
    opening: str, write: Callable[[str, Arguments], str], close: str, **more: Any
) -> Written:
    """Return a format with a list of calls between marks."""
    return Written(opening, write, f"{opening}[", ", ", f"]{close}", **more)


TEXT_VALUES = BARE_TEXT | JSON_VALUES.filter(
    lambda value: value is not None and not isinstance(value, str)
)
GEMMA_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | BARE_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS["gemma"], inner, max_size=2),
    max_leaves=6,
)
TAGGED: dict[str, Any] = {"keys": "tags", "values": TEXT_VALUES}
GLM = tags("%n\n", "<arg_key>%k</arg_key>\n<arg_value>", "</arg_value>", "")
HUNYUAN = tags(
    "%n<tool_sep:opensource>\n",
    "<arg_key:opensource>%k</arg_key:opensource>\n<arg_value:opensource>",
    "</arg_value:opensource>",
    "",
)
CODER = tags("\n<function=%n>\n", "<parameter=%k>", "</parameter>", "</function>\n", "\n")
MINIMAX = tags('\n<invoke name="%n">\n', '<parameter name="%k">', "</parameter>", "</invoke>\n")
MUSE = tags(
    '\n<atem:invoke name="%n">\n',
    '<atem:parameter name="%k">',
    "</atem:parameter>",
    "</atem:invoke>\n",
)
DSML = tags(
    '\n<｜DSML｜invoke name="%n">\n',
    '<｜DSML｜parameter name="%k" string="%t">',
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>\n",
)

FORMATS: dict[str, Written] = {
    "hermes": each("<tool_call>", CALL, "</tool_call>"),
    "qwen3_coder": each("<tool_call>", CODER, "</tool_call>", without=("</parameter>",), **TAGGED),
    "seed": each(
        "<seed:tool_call>",
        tags("\n<function=%n>\n", "<parameter=%k>", "</parameter>", "</function>\n"),
        "</seed:tool_call>",
        thinking=("<seed:think>", "</seed:think>"),
        without=("</parameter>",),
        **TAGGED,
    ),
    "mistral": each(
        "[TOOL_CALLS]",
        lambda name, given: f"{name}[ARGS]{dumped(given)}",
        "",
        thinking=("[THINK]", "[/THINK]"),
    ),
    "mistral list": listed("[TOOL_CALLS]", CALL, "", thinking=("[THINK]", "[/THINK]")),
    "deepseek": each(
        "<｜tool▁call▁begin｜>",
        lambda name, given: f"{name}<｜tool▁sep｜>{dumped(given)}",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek fence": each(
        "<｜tool▁call▁begin｜>",
        lambda name, given: f"function<｜tool▁sep｜>{name}\n```json\n{dumped(given)}\n```",
        "<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek tags": Written(
        "<｜DSML｜tool_calls>",
        DSML,
        "<｜DSML｜tool_calls>",
        "\n",
        "</｜DSML｜tool_calls>",
        without=("</｜DSML｜parameter>",),
        **TAGGED,
    ),
    "glm": each("<tool_call>", GLM, "</tool_call>", without=("</arg_value>",), **TAGGED),
    "hunyuan": each(
        "<tool_call:opensource>",
        HUNYUAN,
        "</tool_call:opensource>",
        before="<tool_calls:opensource>",
        after="</tool_calls:opensource>",
        thinking=("<think:opensource>", "</think:opensource>"),
        without=("</arg_value:opensource>",),
        **TAGGED,
    ),
    "kimi": each(
        "<|tool_call_begin|>",
        lambda name, given: f"functions.{name}:0<|tool_call_argument_begin|>{dumped(given)}",
        "<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "kimi_k3": Written(
        "<|open|>tools<|sep|>",
        typed_tags,
        "<|open|>tools<|sep|>",
        "",
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        without=("<|close|>argument<|sep|>",),
        **TAGGED,
    ),
    "harmony": each(
        "<|channel|>commentary to=functions.",
        lambda name, given: f"{name} <|constrain|>json<|message|>{dumped(given)}",
        "<|call|>",
        between="<|start|>assistant",
        text=False,
        thinking=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ),
    "cohere": listed(
        "<|START_ACTION|>",
        COHERE_CALL,
        "<|END_ACTION|>",
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "command_r": listed("Action:\n```json\n", COHERE_CALL, "```"),
    "gemma": each(
        "<|tool_call>",
        gemma('<|"|>'),
        "<tool_call|>",
        keys="gemma",
        values=GEMMA_VALUES,
        without=('<|"|>',),
        thinking=("<|channel>thought\n", "<channel|>"),
    ),
    "lfm2": listed("<|tool_call_start|>", python_call, "<|tool_call_end|>", keys="python"),
    "minimax_m2": Written(
        "<minimax:tool_call>",
        MINIMAX,
        "<minimax:tool_call>",
        "\n",
        "</minimax:tool_call>",
        without=("</parameter>",),
        **TAGGED,
    ),
    "muse": Written(
        "<atem:function_calls>",
        MUSE,
        "<atem:function_calls>",
        "\n",
        "</atem:function_calls>",
        thinking=("to=self<|message|>", "<|eom|>"),
        without=("</atem:parameter>",),
        **TAGGED,
    ),
    "minimax_m1": Written("<tool_calls>", CALL, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "apriel": listed(
        "<tool_calls>", CALL, "</tool_calls>", thinking=("", "[BEGIN FINAL RESPONSE]")
    ),
    "nemotron_v2": listed("<TOOLCALL>", CALL, "</TOOLCALL>"),
    "gigachat": each("<|function_call|>", CALL, ""),
    "functionary": Written(
        "<function=", lambda name, given: f"<function={name}>{dumped(given)}</function>"
    ),
    "minicpm": Written("<function ", minicpm, without=("]]>", "</function>"), **TAGGED),
    "solar": each(
        "<|tool_call:begin|>",
        lambda name, given: f"a1<|tool_call:name|>{name}<|tool_call:args|>{dumped(given)}",
        "<|tool_call:end|>",
        before="<|tool_calls|>",
        thinking=("<|think|>", "<|end|>"),
    ),
    "granite": listed("<|tool_call|>", CALL, ""),
    "internlm2": each("<|action_start|><|plugin|>", LLAMA_CALL, "<|action_end|>"),
    "function_gemma": each(
        "<start_function_call>",
        gemma("<escape>"),
        "<end_function_call>",
        keys="gemma",
        values=GEMMA_VALUES,
        without=("<escape>",),
    ),
    "minicpm3": Written(
        "<|tool_call_start|>",
        python_call,
        "<|tool_call_start|>\n```python\n",
        "\n",
        "\n```\n<|tool_call_end|>",
        keys="python",
        thinking=("<|thought_start|>", "<|thought_end|>"),
    ),
    "olmo3": Written(
        "<function_calls>",
        python_call,
        "<function_calls>",
        "\n",
        "</function_calls>",
        keys="python",
    ),
    "apertus": listed(
        "<|tools_prefix|>", lambda name, given: dumped({name: given}), "<|tools_suffix|>"
    ),
    "llama3": Written('{"name":', LLAMA_CALL, between="; ", text=False),
    "llama3 with a text": Written(
        "<|python_start|>", LLAMA_CALL, "<|python_start|>Let me see.<|python_end|>", text=False
    ),
    "pythonic": Written(
        "<|python_start|>",
        python_call,
        "<|python_start|>[",
        ", ",
        "]<|python_end|>",
        keys="python",
        text=False,
    ),
    "json_list": Written('[{"name":', CALL, "[", ", ", "]", text=False),
}


def test_every_format_has_a_writer():
    assert {name.split(" ")[0] for name in FORMATS} == set(PARSERS)


def has_any(value: Any, texts: tuple[str, ...]) -> bool:
    if isinstance(value, dict):
        return any(has_any(item, texts) for item in value.items())
    if isinstance(value, (list, tuple)):
        return any(has_any(item, texts) for item in value)
    return isinstance(value, str) and any(text in value for text in texts)


@st.composite
def replies(draw: st.DrawFn, written: Written) -> Calls:
    names = draw(st.lists(NAMES, min_size=1, max_size=3))
    arguments = st.dictionaries(KEYS[written.keys], written.values, max_size=3)
    return [
        (name, draw(arguments.filter(lambda given: not has_any(given, written.without))))
        for name in names
    ]


def tools_of(calls: Calls) -> list[dict[str, Any]]:
    """Return the schemas of the tools; bare text is read by them."""
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        kinds = properties.setdefault(name, {})
        for key, value in arguments.items():
            kinds[key] = {"type": schema_type(value)}
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": kinds}},
        }
        for name, kinds in properties.items()
    ]


def distinct_types(calls: Calls) -> bool:
    """Return whether no argument of one tool has two types: its schema tells one."""
    kinds: dict[tuple[str, str], str] = {}
    return all(
        kinds.setdefault((name, key), schema_type(value)) == schema_type(value)
        for name, given in calls
        for key, value in given.items()
    )


def same(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=12)
def test_calls_are_read_back_and_a_cut_reply_has_no_other_call(name, data):
    written = FORMATS[name]
    parser = PARSERS[name.split(" ")[0]]
    calls = data.draw(replies(written).filter(distinct_types))
    text = data.draw(WORDS) if written.text else ""
    opens, closes = written.thinking
    thought = data.draw(st.sampled_from(("", f"{opens}Hm.{closes}")))
    reply = thought + written.reply(calls, text)
    tools = tools_of(calls)
    wanted = [(name, same(given)) for name, given in calls]

    message = parser.parse(reply, tools)
    assert [
        (call.name, same(call.arguments)) for call in message.tool_calls if call.error is None
    ] == wanted, reply
    assert message.reasoning == ("Hm." if thought else None)
    assert message.text == (text or ("Let me see." if "text" in name else ""))

    begun = (
        len(thought)
        + len(text)
        + len((written.before + written.opening).partition(written.opening)[0])
    )
    begun += len(written.opening)
    for position in range(len(reply)):
        cut = parser.parse(reply[:position], tools)
        read = [(call.name, same(call.arguments)) for call in cut.tool_calls if call.error is None]
        assert read == wanted[: len(read)], reply[:position]
        if position >= begun:
            assert cut.tool_calls, reply[:position]
        elif position < begun - len(written.opening):
            assert not read


# What models write wrongly: any of a reply's parts left out, doubled or exchanged.
@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=8)
def test_a_reply_without_its_beginning_has_no_other_call(name, data):
    written = FORMATS[name]
    parser = PARSERS[name.split(" ")[0]]
    calls = data.draw(replies(written).filter(distinct_types))
    reply = written.reply(calls, "")
    tools = tools_of(calls)
    wanted = {(name, same(given)) for name, given in calls}
    for position in range(len(reply)):
        message = parser.parse(reply[position:], tools)
        for call in message.tool_calls:
            assert call.error or (call.name, same(call.arguments)) in wanted, reply[position:]
