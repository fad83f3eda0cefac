"""Conversations that `templates.py --turns` plays with every chat template.

A scenario is an opening, and for each turn the reply that is wanted and what answers it.
What a template does with the words of messages is not known beforehand, so the words to try
are read from its source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jinja2 import nodes
from kit.corpus import TOOLS

from turnwright.renderers import ChatTemplate
from turnwright.types import Message, ToolCall

PLANS = {
    "all": ("user", "tool", "tools", "user", "tool user", "tool", "tools", "user", "user"),
    "tools": ("tool", "tools", "tool", "tool", "tools", "tool", "user"),
    "users": ("user",) * 7,
    "rounds": ("tool", "user", "tool", "user", "tool user", "tools", "user"),
}
"""What answers each reply, by scenario."""
ORDERS: dict[str, tuple[str | None, ...]] = {
    "none": (None,),
    "full": ("So.",),
    "empty": ("",),
    "mixed": ("So.", "", None),
}
"""The thinking of successive replies."""
LATE_PLANS = {
    # First a conversation of the same lengths with fewer results: it must not hide what
    # depends on their number.
    "late": ("user",) * 8 + ("tool",) * 13,
    "results": ("tool",) * 20,
    "questions": ("user",) * 26,
}
"""Conversations longer than those that the renderer probes."""

THOUGHT = "First I weigh the amber, then I think about it"
"""Thinking that is cut off in the middle."""
USUAL_WORDS = ("/no_think", "/think")
"""Words that are tried with every template."""
_TEXT_METHODS = ("startswith", "endswith", "find", "split", "replace", "count", "index")
_PART_KEYS = (
    "audio",
    "audio_url",
    "image",
    "image_url",
    "input_audio",
    "parts",
    "text",
    "type",
    "value",
    "video",
)
_TEXT_NAMES = re.compile(r"content|text|system|prompt|query", re.IGNORECASE)

VALUES: dict[str, Any] = {
    "count": -3,
    "ratio": 0.5,
    "flag": True,
    "rows": [1, "a"],
    "deep": {"a": {"b": "x, y: z"}},
    "note": 'say "so" on\ntwo lines',
    "digits": "007",
    "key": "last word",
}
"""Arguments of several types; the last is the one that every call has."""


def _value_tools() -> list[dict[str, Any]]:
    kinds = {
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "string"}},
        "deep": {"type": "object", "additionalProperties": {"type": "object"}},
        "note": {"type": "string"},
        "digits": {"type": "string"},
        "key": {"type": "string"},
    }
    properties = {name: {**kind, "description": "what"} for name, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["key"]}
    function = {"name": "look", "description": "Look something up.", "parameters": parameters}
    return [{"type": "function", "function": function}]


VALUE_TOOLS = _value_tools()


@dataclass(frozen=True)
class Turn:
    """A reply, and what answers it."""

    reply: Message
    new: tuple[Message, ...]
    cut: str = ""
    """How the reply is cut off: not at all, by the `limit` or by a `stop`, inside its
    thinking if it has some."""


@dataclass(frozen=True)
class Scenario:
    """One conversation."""

    name: str
    detail: str
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]
    tools: Sequence[Any] = ()
    words: tuple[str, ...] = ()
    """Words in its texts that the template may remove."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


QUESTION = Message("user", "Question, please.")
SYSTEM = Message("system", "Be brief.")


def answers(kind: str, number: int) -> list[Message]:
    """Return what answers a reply, each time in other words."""
    rows = []
    for place, role in enumerate(("tool", "tool") if kind == "tools" else kind.split()):
        if role == "tool":
            rows.append(result(f"result {number} {place} amber", number, place))
        else:
            rows.append(Message("user", f"Question {number} {place}, please."))
    return rows


def result(text: str | tuple[str, ...], number: int, place: int = 0) -> Message:
    """Return the result of a call of `reply_to`."""
    return Message("tool", text, tool_call_id=f"call{number:04}{place}", name="look")


def reply_to(kind: str, number: int, thought: str | None) -> Message:
    """Return the reply that is answered so."""
    count = sum(message.role == "tool" for message in answers(kind, number))
    if not count:
        return Message("assistant", f"It is {number}.", reasoning=thought)
    return calling(number, count, thought=thought)


def calling(number: int, count: int = 1, *, text: str = "", thought: str | None = None) -> Message:
    """Return a reply with calls."""
    calls = tuple(
        ToolCall("look", {"key": f"word{number}"}, f"call{number:04}{place}")
        for place in range(count)
    )
    return Message("assistant", text, tool_calls=calls, reasoning=thought)


def turns_of(kinds: Sequence[str], thoughts: Sequence[str | None] = (None,)) -> tuple[Turn, ...]:
    """Return the turns of a plan."""
    turns = []
    for number, kind in enumerate(kinds):
        reply = reply_to(kind, number, thoughts[number % len(thoughts)])
        turns.append(Turn(reply, tuple(answers(kind, number))))
    return tuple(turns)


def planned(name: str, kinds: Sequence[str], thinking: str, *, system: bool) -> Scenario:
    """Return a conversation that begins with a question and follows a plan."""
    opening = (SYSTEM, QUESTION) if system else (QUESTION,)
    detail = f"thinking {thinking}{', system' if system else ''}"
    tools = TOOLS if any("tool" in kind for kind in kinds) else []
    return Scenario(name, detail, opening, turns_of(kinds, ORDERS[thinking]), tools)


def plain() -> Iterator[Scenario]:
    """Yield the one plan that has everything in each way, and the others in half of the ways."""
    for name, thinking, system in product(PLANS, ORDERS, (False, True)):
        if name == "all" or (thinking in ("none", "mixed")) == system:
            yield planned(name, PLANS[name], thinking, system=system)


def late() -> Iterator[Scenario]:
    """Yield conversations longer than the renderer probes."""
    for name, kinds in LATE_PLANS.items():
        yield planned(name, kinds, "none", system=False)


def shots() -> Iterator[Scenario]:
    """Yield openings with examples: calls, results, thinking, and thinking inside of the text."""
    called = (QUESTION, calling(90), result("found 90", 90), Message("assistant", "It is resin."))
    asked = (Message("user", "What else?"), Message("assistant", "Nothing else."))
    parallel = (
        Message("user", "Both?"),
        calling(91, 2, text="Let me see twice."),
        result("found 91", 91),
        result("found 92", 91, 1),
        Message("assistant", "They are stone."),
    )
    last = Message("user", "And the last one?")
    after = turns_of(("tool", "user", "tools", "user"))
    openings = {
        "one": (*called, last),
        "two": (SYSTEM, *called, *asked, last),
        "three": (*called, *asked, *parallel, last),
        "results last": (*called, *parallel[:-1]),
    }
    for detail, opening in openings.items():
        yield Scenario("shots", detail, opening, after, TOOLS)
    yield Scenario("shots", "words alone", (*asked, last), turns_of(("user", "user")))

    thinking = [
        replace(m, reasoning="So.") if m.role == "assistant" else m for m in (*called, *asked)
    ]
    yield Scenario("shots thinking", "field", (*thinking, last), after, TOOLS)
    folded = replace(asked[1], content="<think>\nSo.\n</think>\n\nNothing else.")
    yield Scenario(
        "shots thinking", "in the text", (asked[0], folded, last), turns_of(("user", "user"))
    )


def replies() -> Iterator[Scenario]:
    """Yield replies of more kinds: text beside calls, parallel calls, arguments of several types,
    replies that are cut off."""
    for thinking, order in ORDERS.items():
        said = [
            calling(number, text="Let me see.", thought=order[number % len(order)])
            for number in range(3)
        ]
        rows = [Turn(reply, tuple(answers("tool", number))) for number, reply in enumerate(said)]
        yield Scenario(
            "text and call",
            f"thinking {thinking}",
            (QUESTION,),
            (*rows, *turns_of(("user",))),
            TOOLS,
        )

    three = tuple(result(f"result {place} amber", 0, place) for place in range(3))
    yield Scenario(
        "parallel",
        "three",
        (QUESTION,),
        (Turn(calling(0, 3), three), *turns_of(("user",) * 2)),
        TOOLS,
    )

    calls = tuple(ToolCall("look", VALUES, f"call0000{place}") for place in range(2))
    for number in (1, 2):
        reply = Message("assistant", "", tool_calls=calls[:number])
        turn = Turn(reply, three[:number])
        yield Scenario(
            "values", f"{number} calls", (QUESTION,), (turn, *turns_of(("user",) * 2)), VALUE_TOOLS
        )

    for cut in ("limit", "stop"):
        thought = Message("assistant", "It is so.", reasoning=THOUGHT)
        turn = Turn(thought, (Message("user", "Go on, please."),), cut)
        plainly = turns_of(("user", "user"))
        yield Scenario(f"unclosed {cut}", "first", (QUESTION,), (turn, *plainly))
        yield Scenario(
            f"unclosed {cut}", "later, twice", (SYSTEM, QUESTION), (*plainly, turn, turn, *plainly)
        )
        yield Scenario(
            f"unclosed {cut}", "with tools", (QUESTION,), (turn, *turns_of(("tool", "user"))), TOOLS
        )
    spoken = Turn(
        Message("assistant", "It is so and so."), (Message("user", "Go on, please."),), "limit"
    )
    yield Scenario("cut text", "first", (QUESTION,), (spoken, *turns_of(("user", "user"))))


def contents() -> Iterator[Scenario]:
    """Yield results that are empty, and contents in parts."""
    for detail, text in (("empty", ""), ("white space", "  \n")):
        one = Turn(calling(0), (result(text, 0),))
        both = Turn(calling(1, 2), (result(text, 1), result("found", 1, 1)))
        yield Scenario(
            "empty results", detail, (QUESTION,), (one, both, *turns_of(("user",) * 2)), TOOLS
        )

    parts = ("alpha", "beta")
    asked = Message("user", parts)
    told = Turn(calling(0), (result(parts, 0),))
    question = Turn(Message("assistant", "It is so."), (asked,))
    yield Scenario("parts", "user", (asked,), (question, *turns_of(("user",))))
    yield Scenario("parts", "system", (Message("system", parts), QUESTION), turns_of(("user",)))
    yield Scenario("parts", "tool", (QUESTION,), (told, *turns_of(("user",))), TOOLS)
    shot = (
        QUESTION,
        calling(9),
        result(parts, 9),
        Message("assistant", "So."),
        Message("user", "Next?"),
    )
    yield Scenario("parts", "opening", shot, turns_of(("user",)), TOOLS)


def worded(words: Sequence[str]) -> Iterator[Scenario]:
    """Yield conversations with each of the words at each place, behind the text and before it."""
    for word, before in product(words, (False, True)):

        def said(text: str, word: str = word, before: bool = before) -> str:
            return f"{word} {text}" if before else f"{text} {word}"

        where = f"{word!r} {'before' if before else 'behind'} the text of"
        system = replace(SYSTEM, content=said(SYSTEM.text))
        asked = replace(QUESTION, content=said(QUESTION.text))
        after = turns_of(("user", "tool", "user"))
        yield Scenario("words", f"{where} system", (system, QUESTION), after, TOOLS, (word,))
        yield Scenario("words", f"{where} the question", (asked,), after, TOOLS, (word,))

        told = Turn(calling(0), (result(said("found amber"), 0),))
        yield Scenario("words", f"{where} a result", (QUESTION,), (told, *after), TOOLS, (word,))
        spoken = Turn(Message("assistant", "It is so."), (Message("user", said("And then?")),))
        yield Scenario(
            "words", f"{where} a new question", (SYSTEM, QUESTION), (spoken, *after), TOOLS, (word,)
        )
        shot = (asked, Message("assistant", "It is so."), Message("user", "And then?"))
        yield Scenario("words", f"{where} an example", shot, after, TOOLS, (word,))


def switching_words(template: ChatTemplate) -> list[str]:
    """Return words whose presence in a text the template tests, or that it removes.

    Control text is left out: in messages it is encoded as plain text.
    """
    tree = template._compiled.environment.parse(template.source)
    found = dict.fromkeys(USUAL_WORDS)
    for compare in tree.find_all(nodes.Compare):
        for operand in compare.ops:
            literal = isinstance(operand.expr, (nodes.List, nodes.Tuple, nodes.Const))
            if operand.op in ("in", "notin") and not literal:
                found |= dict.fromkeys(_words(compare.expr, _name(operand.expr)))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _TEXT_METHODS and call.args:
            found |= dict.fromkeys(_words(call.args[0], _name(call.node.node)))
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name == "replace" and filtered.args:
            found |= dict.fromkeys(_words(filtered.args[0], _name(filtered.node)))
    return list(found)


def _words(expression: nodes.Node, name: str) -> list[str]:
    """Return the word of a literal that is looked for in something of this name."""
    if not isinstance(expression, nodes.Const) or not isinstance(expression.value, str):
        return []
    word = expression.value.strip()
    is_key = re.fullmatch(r"[a-z_]+", word) is not None and not _TEXT_NAMES.search(name)
    is_key |= word in _PART_KEYS
    is_text = len(word) > 2 and any(char.isalpha() for char in word)
    if not is_text or is_key or re.search(r"[<>\[\]{}|\n]", word):
        return []
    return [word]


def _name(expression: nodes.Node) -> str:
    """Return the last name in an expression, such as `content` of `messages[0].content`."""
    if isinstance(expression, nodes.Getattr):
        return expression.attr
    if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Const):
        return str(expression.arg.value)
    if isinstance(expression, nodes.Name):
        return expression.name
    inner = getattr(expression, "node", None)
    return _name(inner) if isinstance(inner, nodes.Node) else ""
