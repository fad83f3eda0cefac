"""Replies as every chat template writes them, read by the renderer's parser;
see `templates.py --turns`.

A reply is rendered where it comes last and cut as an engine cuts it: from the generation prompt to
the first stop. What is not read back must be said by `turnwright check`: that a stop comes before
the end of such replies, or that no parser reads the calls.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from kit.corpus import TOOLS
from template_reference import Refused
from template_scenarios import QUESTION, VALUE_TOOLS, VALUES, calling
from template_turns import Fault, Player

from turnwright.errors import TemplateError
from turnwright.renderers import ChatTemplate
from turnwright.types import Message, ToolCall

KINDS = ("rendered", "read", "warned", "silent")
READ_COUNTS = tuple(f"{what}_{kind}" for what in ("calls", "texts") for kind in KINDS)
SECOND = {"count": 0, "flag": False, "note": "true", "digits": "[1", "key": "other word"}
"""Arguments that another type could be made of."""


@dataclass
class Reads:
    """What came of the replies of one template."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    """What was not read, and of which nothing is said."""


def _replies() -> dict[str, tuple[Message, Any]]:
    """The replies to read, with the tools that are offered."""
    call, other = ToolCall("look", VALUES, "call00000"), ToolCall("look", SECOND, "call00001")
    bare = ToolCall("look", {}, "call00000")
    return {
        "call": (calling(0), TOOLS),
        "thinking, call": (calling(0, thought="So."), TOOLS),
        "text, call": (calling(0, text="Let me see."), TOOLS),
        "thinking, text, call": (calling(0, text="Let me see.", thought="So."), TOOLS),
        "two calls": (calling(0, 2), TOOLS),
        "three calls": (calling(0, 3), TOOLS),
        "call of many types": (Message("assistant", "", (call,)), VALUE_TOOLS),
        "two calls of many types": (Message("assistant", "", (call, other)), VALUE_TOOLS),
        "call without arguments": (Message("assistant", "", (bare,)), TOOLS),
        "text": (Message("assistant", "It is so."), ()),
        "thinking, text": (Message("assistant", "It is so.", reasoning="So."), ()),
        "text with tools": (Message("assistant", "It is so."), TOOLS),
        "thinking, text with tools": (Message("assistant", "It is so.", reasoning="So."), TOOLS),
    }


def read_replies(source: str, template: ChatTemplate) -> Reads:
    """Render, cut and parse replies of each kind."""
    reads = Reads()
    try:
        player = Player(source, template)
    except TemplateError:
        return reads
    for kind, (wanted, tools) in _replies().items():
        try:
            _read(player, kind, wanted, tools, reads)
        except Refused:
            continue
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            reads.faults.append(Fault("reads", kind, "", "", "crashes", said))
    return reads


def _read(player: Player, kind: str, wanted: Message, tools: Any, reads: Reads) -> None:
    reference, renderer = player.reference, player.renderer
    shown = reference.shown([QUESTION, wanted], tools, prompt=False)
    if wanted.tool_calls and (
        not reference.reads_calls or "look" not in shown.rpartition(QUESTION.text)[2]
    ):
        return  # the template writes no calls
    if wanted.tool_calls and shown.count("look") < shown_once(player, tools) + len(
        wanted.tool_calls
    ):
        return  # it writes the first call alone
    if reference.folds or (
        wanted.reasoning and wanted.reasoning not in shown.rpartition(QUESTION.text)[2]
    ):
        wanted = replace(wanted, reasoning=None)  # the template has no field for thinking

    text, stop = player.written([QUESTION], wanted, [Message("user", "And then?")], tools)
    if text.lstrip().startswith(renderer.contract.prefix):
        # Not where the generation prompt writes it.
        text = text.lstrip().removeprefix(renderer.contract.prefix)
    ids = reference.ids(text)
    # A template that ends such a reply without a stop goes on with a header,
    # which no reply contains.
    ids = [*takewhile(lambda i: i not in renderer.invalid_ids, ids), stop]
    found = renderer.parse(ids, tools)
    what = "calls" if wanted.tool_calls else "texts"
    reads.counts[f"{what}_rendered"] += 1
    if _contents(found) == _contents(wanted):
        reads.counts[f"{what}_read"] += 1
        return

    if is_warned(player, wanted):
        reads.counts[f"{what}_warned"] += 1
        return
    reads.counts[f"{what}_silent"] += 1
    outcome = f"read as {renderer.call_format[0]!r}"
    built, written = str(_contents(found)), renderer.decode(ids)
    reads.faults.append(
        Fault(
            "reads", kind, "", "reply", "silent", outcome, built, f"{written!r} of {shown[-300:]!r}"
        )
    )


def shown_once(player: Player, tools: Any) -> int:
    """How often the tool's name is in a conversation without calls."""
    return player.reference.shown(
        [QUESTION, Message("assistant", "It is so.")], tools, prompt=False
    ).count("look")


def is_warned(player: Player, wanted: Message) -> bool:
    """Whether `turnwright check` says that such replies are not read."""
    if wanted.tool_calls and player.renderer.call_format[1]:
        return True
    contract = player.renderer.contract
    if contract.thinks and contract.prefilled:
        return True  # the prompt opens thinking, and the template writes this reply without
    about_calls = any("call" in unread.kind for unread in player.renderer.unread_replies)
    about_texts = any("call" not in unread.kind for unread in player.renderer.unread_replies)
    return about_calls or about_texts if wanted.tool_calls else about_texts


def _contents(message: Message) -> tuple[Any, ...]:
    """What has to be equal of two replies: the calls, else the thinking and the text.

    Some templates leave out the text beside a call.
    """
    if message.tool_calls:
        return tuple((call.name, dict(call.arguments), call.error) for call in message.tool_calls)
    return (message.reasoning or "").strip(), message.text.strip()
