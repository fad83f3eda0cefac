"""The contract of a chat template: how it behaves while a conversation grows.

`derive_contract` asks a template questions, each answered by one or two renderings of short
conversations (`_TemplateQueries`), and `explain_contract` puts the answers into words for
`turnwright check`. Nothing is read from the template's source but the names of its variables.

Prompts do not depend on the contract: what is appended to a reply is proven where it is needed
(`TemplateProbe.append`). Whether replies are read back is in `reply_proof.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from turnwright.errors import TemplateError
from turnwright.renderers.probe import CONVERSATIONS, TemplateProbe
from turnwright.renderers.renderer import common_prefix_length
from turnwright.renderers.template import (
    ASKED,
    PROBE_CALL,
    PROBE_TOOLS,
    ChatTemplate,
    call_id,
    probe_result,
    random_mark,
)
from turnwright.types import ImageRef, Message, ToolCall, Tools

if TYPE_CHECKING:
    from turnwright.renderers.tokenizer import Tokenizer


SCENARIOS: Mapping[str, tuple[str, ...]] = {
    "user": ("user",),
    "tool": ("tool",),
    "tool, user": ("tool", "user"),
}
"""Roles of the messages after a reply, by scenario name."""
_NOT_SETTINGS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
}
"""Variables that a template reads besides its settings."""
_CLOCKS = ("strftime_now",)
_MAX_TURNS = 24
"""Turns of the longest probed conversation, which detects windows."""
_MAX_REPLIES = 12
"""Number of its last replies to check."""


@dataclass(frozen=True, slots=True)
class TemplateContract:
    """Behavior of a chat template in a growing conversation."""

    kind: str
    """Its class: `append-only`; `strips on user`, `strips on tool` or `strips always` (thinking of
    earlier turns); `swaps the close`; `splits replies` (renders one with calls as two messages, so
    that it would stop in between); `rewrites messages` (renders an earlier one differently once
    something follows); `moves tools` (moves their description to the last user message);
    `strips older` (thinking of replies further back); `prefilled` (see that field)."""
    prefilled: bool
    """Whether some kind of finished reply is not rendered after the generation prompt that
    it was sampled after."""
    swaps_close: bool
    """Whether a reply is closed differently once something follows it."""
    folds_tools: bool
    """Whether consecutive tool results become one message, so that they are appended at once."""
    stops: tuple[str, ...]
    """Control tokens that end a reply, as texts."""
    heads: bool
    """Whether a reply ends in the header of the next message."""
    close: str
    """Text after a reply's content in the middle of a conversation, up to its stop."""
    last: str
    """Text after the last reply of a conversation."""
    tail: str
    """Text that the template writes after the stop, which is never sampled."""
    prefix: str
    """Text that opens a reply: the generation prompt."""
    thinks: bool
    """Whether the generation prompt opens the thinking."""
    thinking: Mapping[str, bool]
    """Whether a reply's thinking is rendered: `last` if nothing follows, `user` and `tool`
    if such a message does."""
    switches: Mapping[str, str]
    """Settings of the template and their effects."""
    appends: Mapping[str, str]
    """By scenario: `append`, `tail`, `swap` (see `AppendProbe.proof`), with `as user` if tool
    results are rendered as user text; or `refused: why`."""
    stateful: tuple[str, ...]
    """Scenarios in which the appended text depends on earlier turns (a counter, a flag, a window, a
    moving system message); it is derived for each shape of conversation."""
    roles: tuple[str, ...]
    """Roles that may follow a reply."""
    moves_text: bool
    """Whether the text of a reply with calls is rendered after their results, once they follow."""
    tool_images: bool | None
    """Whether tool messages keep their images; None if no message does."""
    system: str
    """Handling of a system message: `shown`, `dropped`, `refused`, or `moved` (to
    the last user message)."""
    default_system: bool
    """Whether the template adds a system message to a conversation without one."""
    impure: tuple[str, ...]
    """Inputs besides the conversation (`strftime_now`: the date), frozen during a run."""
    seams: tuple[str, ...]
    """Positions where encoding piece by piece differs from encoding the complete text."""

    @property
    def append_only(self) -> bool:
        """Whether all earlier text stays unchanged, so that a conversation only grows in
        `template` mode too."""
        return self.kind == "append-only"


def derive_contract(probe: TemplateProbe, codec: Tokenizer, *, thinks: bool) -> TemplateContract:
    """Derive the contract of a template by probing.

    `thinks` says whether replies are parsed as starting inside the thinking.

    Raises `TemplateError` if the template cannot render a reply to a user.
    """
    template = probe.template
    queries = _TemplateQueries(probe)
    thinking = queries.thinking()
    prefix = queries.prefix()
    prefilled = not queries.continues()

    # How messages follow a reply.
    thought = "thought" if queries.has_reasoning_field else None
    appends: dict[str, str] = {}
    stateful: list[str] = []
    for scenario, roles in SCENARIOS.items():
        appends[scenario], depends_on_earlier = _append_proof(probe, roles, thought)
        if depends_on_earlier:
            stateful.append(scenario)

    # Its class: what it does first of all that could surprise.
    if queries.splits():
        kind = "splits replies"
    else:
        kind = _kind(thinking, appends, prefilled, queries.keeps_results(), queries.moves_tools())
    if kind in ("append-only", "prefilled") and not queries.grows():
        kind = "strips older" if queries.grows(thinking=False) else "rewrites messages"

    following_roles = [
        role for role in ("user", "tool", "system", "assistant") if queries.follows(role)
    ]
    clocks = [name for name in _CLOCKS if re.search(rf"\b{name}\b", template.source)]
    return TemplateContract(
        kind=kind,
        prefilled=prefilled,
        swaps_close=appends["user"].startswith("swap"),
        folds_tools=queries.folds_tools(),
        stops=probe.stops,
        heads=probe.text.heads,
        close=probe.text.head,
        last=probe.text.last,
        tail=probe.text.last[len(probe.text.close_in_last) :],
        prefix=prefix,
        thinks=thinks,
        thinking=thinking,
        switches=_switches(probe, thinking, prefix, template.parameters),
        appends=appends,
        stateful=tuple(stateful),
        roles=tuple(following_roles),
        moves_text=queries.moves_text(),
        tool_images=queries.tool_images(),
        system=queries.system(),
        default_system=queries.default_system(),
        impure=tuple(clocks),
        seams=_seams(probe, codec),
    )


class _TemplateQueries:
    """Queries of a template, each answered by one or two renderings."""

    def __init__(self, probe: TemplateProbe, template: ChatTemplate | None = None) -> None:
        self.probe = probe
        self.template = template or probe.template
        self.has_reasoning_field = False

    def render(self, *messages: Message, prompt: bool = False) -> str:
        """Render messages, with a tool schema where required; empty if the template rejects
        them."""
        called = any(message.tool_calls or message.role == "tool" for message in messages)
        for tools in (PROBE_TOOLS, ()) if called else ((), PROBE_TOOLS):
            text = self.template.try_render(messages, tools, generation_prompt=prompt)
            if text is not None:
                return text
        return ""

    def _stays(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool = False,
    ) -> bool | None:
        """Return whether the text of `before` begins that of `after`.

        None if the template rejects one of them.
        """
        first = self.template.try_render(before, tools, generation_prompt=prompt)
        full = self.template.try_render(after, tools)
        if first is None or full is None:
            return None
        return full.startswith(first)

    def thinking(self) -> dict[str, bool]:
        """Return whether thinking is rendered, by what follows it: in its own field, else in the
        text."""
        in_field = self._thinking(lambda thought: {"reasoning": thought}, "")
        self.has_reasoning_field = any(in_field.values())
        if self.has_reasoning_field:
            return in_field

        text = random_mark()
        return self._thinking(
            lambda thought: {"content": f"<think>\n{thought}\n</think>\n\n{text}"}, text
        )

    def _thinking(self, fields: Callable[[str], Mapping[str, Any]], text: str) -> dict[str, bool]:
        """Return whether a thought is rendered.

        `fields` puts a thought into a reply. A thought inside a text counts as rendered if the
        text is not.
        """
        thought = random_mark()
        reply = replace(Message("assistant", "reply"), **fields(thought))
        called = replace(Message("assistant", "", (PROBE_CALL,)), **fields(thought))

        def is_rendered(*messages: Message) -> bool:
            rendered = self.render(*messages, prompt=len(messages) > 2)
            return thought in rendered or bool(text and text not in rendered)

        return {
            "last": is_rendered(ASKED, reply),
            "user": is_rendered(ASKED, reply, ASKED),
            "tool": is_rendered(ASKED, called, probe_result("result")),
        }

    def prefix(self) -> str:
        """Return the text that opens a reply: the generation prompt, else the text between a
        question and its answer."""
        without = self.template.render((ASKED,))
        prompted = self.template.render((ASKED,), generation_prompt=True)
        if prompted != without:
            return self._added_text(without, prompted)

        question, answer = random_mark(), random_mark()
        rendered = self.render(Message("user", question), Message("assistant", answer))
        between, found, _ = rendered.rpartition(question)[2].partition(answer)
        return between if found else ""

    def _added_text(self, without: str, prompted: str) -> str:
        """Return what the second text adds to the first; it never begins within a control
        token."""
        pieces = self.probe.split.split(prompted)
        other_pieces = self.probe.split.split(without)

        same = 0
        while same < min(len(pieces), len(other_pieces)) and pieces[same] == other_pieces[same]:
            same += 1

        if same < min(len(pieces), len(other_pieces)) and pieces[same] not in self.probe.control:
            start = common_prefix_length(pieces[same], other_pieces[same])
            pieces[same] = pieces[same][start:]
        return "".join(pieces[same:])

    def continues(self) -> bool:
        """Return whether finished replies of every kind are rendered after the generation prompt
        they were sampled after."""
        for calls in ((), (PROBE_CALL,)):
            for thought in (None, "thought") if self.has_reasoning_field else (None,):
                text = "" if calls else "reply"
                reply = Message("assistant", text, tool_calls=calls, reasoning=thought)
                tools = PROBE_TOOLS if calls else ()
                if self._stays((ASKED,), (ASKED, reply), tools, prompt=True) is False:
                    return False
        return True

    def moves_tools(self) -> bool:
        """Return whether the tool descriptions move once another user message follows."""
        base = (ASKED, Message("assistant", "reply"))
        without = self.template.try_render(base)
        if without is None or without == self.template.try_render(base, PROBE_TOOLS):
            return False
        return self._stays(base, (*base, Message("user", "on")), PROBE_TOOLS) is False

    def keeps_results(self) -> bool:
        """Return whether a message after a reply is rendered the same once the next reply follows
        it."""
        thought = "thought" if self.has_reasoning_field else None
        answer = Message("assistant", "reply", reasoning=thought)
        after_text = (ASKED, answer, ASKED)
        after_call = (ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result("result"))

        for rows, tools in ((after_text, ()), (after_call, PROBE_TOOLS)):
            stays = [
                self._stays(rows, (*rows, reply), tools, prompt=True)
                for reply in (answer, replace(answer, reasoning=None))
            ]
            if stays == [False, False]:
                return False
        return True

    def grows(self, *, thinking: bool = True) -> bool:
        """Return whether all text stays in long conversations with calls, a system message and
        thinking."""
        many_turns = (ASKED, Message("assistant", "a")) * _MAX_TURNS + (ASKED,)
        for conversation in (*CONVERSATIONS, many_turns):
            messages: Sequence[Message] = conversation
            if not thinking:
                messages = [replace(message, reasoning=None) for message in conversation]
            tools = PROBE_TOOLS if any(message.role == "tool" for message in messages) else ()
            full = self.template.try_render(messages, tools, generation_prompt=True)

            ends = [number + 1 for number, m in enumerate(messages) if m.role == "assistant"]
            for end in ends[-_MAX_REPLIES:]:
                text = self.template.try_render(messages[:end], tools)
                if full is None or text is None:
                    break
                if not full.startswith(text):
                    return False
        return True

    def splits(self) -> bool:
        """Return whether a reply's text is closed before its calls begin."""
        argument = random_mark()
        called = Message("assistant", "", (replace(PROBE_CALL, arguments={"x": argument}),))
        prompted = self.template.try_render((ASKED,), PROBE_TOOLS, generation_prompt=True)
        rendered = self.template.try_render((ASKED, called), PROBE_TOOLS)
        if prompted is None or rendered is None:
            return False
        if not rendered.startswith(prompted) or argument not in rendered:
            return False

        reply = rendered[len(prompted) :].partition(argument)[0]
        return any(stop in reply for stop in self.probe.text.stops)

    def folds_tools(self) -> bool:
        """Return whether a second tool result changes the rendering of the first."""
        calls = tuple(ToolCall("f", {"x": str(i)}, call_id(i)) for i in range(2))
        base = (ASKED, Message("assistant", "", calls), probe_result("result 0"))
        with_one = self.render(*base)
        with_both = self.render(*base, probe_result("result 1", 1))
        return bool(with_one) and bool(with_both) and not with_both.startswith(with_one)

    def moves_text(self) -> bool:
        """Return whether the text of a reply with calls is rendered after their results."""
        text, result = random_mark(), random_mark()
        reply = Message("assistant", text, (PROBE_CALL,))
        rendered = self.render(ASKED, reply, probe_result(result), prompt=True)
        return 0 <= rendered.find(result) < rendered.find(text)

    def follows(self, role: str) -> bool:
        """Return whether a message of a role can follow a reply."""
        text = random_mark()
        if role == "tool":
            reply = Message("assistant", "", (PROBE_CALL,))
            message = probe_result(text)
        else:
            reply = Message("assistant", "reply")
            message = Message(role, text)
        return text in self.render(ASKED, reply, message, prompt=True)

    def system(self) -> str:
        """Return the handling of a system message, see `TemplateContract.system`."""
        text, reply = random_mark(), random_mark()
        asked = (Message("system", text), ASKED)
        rendered = self.render(*asked, prompt=True)
        later = self.render(*asked, Message("assistant", reply), ASKED, prompt=True)
        if text in rendered:
            return "moved" if text in later.partition(reply)[2] else "shown"
        return "dropped" if rendered else "refused"

    def default_system(self) -> bool:
        """Return whether the template writes more without a system message than with an empty
        one."""
        without = self.render(ASKED, prompt=True)
        with_empty = self.render(Message("system", ""), ASKED, prompt=True)
        with_text = self.render(Message("system", "s"), ASKED, prompt=True)
        return bool(with_text) and len(without) > len(with_empty) > 0

    def tool_images(self) -> bool | None:
        """Return whether an image in a tool message is rendered; None if no message shows one."""
        image = ImageRef("0" * 64)
        twin = _TemplateQueries(self.probe, self.template.with_message_format(parts=True))

        def shows_image(*base: Message) -> bool:
            last = base[-1]
            with_image = replace(last, content=(image, "t"))
            rendered = twin.render(*base[:-1], with_image)
            if not rendered or rendered == twin.render(*base):
                return False
            return image.sha256 not in rendered  # else the list of parts was printed as it is

        if not shows_image(Message("user", "t")):
            return None
        return shows_image(ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result("t"))


def _kind(
    thinking: Mapping[str, bool],
    appends: Mapping[str, str],
    prefilled: bool,
    keeps_results: bool,
    moves_tools: bool,
) -> str:
    if not thinking["user"]:
        return "strips on user" if thinking["last"] and thinking["tool"] else "strips always"
    if thinking["last"] and not thinking["tool"] and appends["tool"] in ("append", "tail", "swap"):
        return "strips on tool"
    if appends["user"] == "swap":
        return "swaps the close"
    if any(proof.startswith(("tail", "swap")) for proof in appends.values()):
        return "rewrites messages"
    if prefilled:
        return "prefilled"
    if moves_tools:
        return "moves tools"
    return "append-only" if keeps_results else "rewrites messages"


def _append_proof(
    probe: TemplateProbe, roles: Sequence[str], thought: str | None
) -> tuple[str, bool]:
    """Return how messages of these roles are appended to a reply, and whether that depends on
    earlier turns."""
    calls: list[ToolCall] = []
    messages: list[Message] = []
    for number, role in enumerate(roles):
        if role == "tool":
            calls.append(ToolCall("f", {"x": "1"}, call_id(number)))
            messages.append(probe_result("t", number))
        else:
            messages.append(Message(role, "t"))
    text = "" if calls else "reply"
    reply = Message("assistant", text, tool_calls=tuple(calls), reasoning=thought)
    tools = PROBE_TOOLS if calls else ()

    try:
        append = probe.append(reply, messages, tools)
    except TemplateError as error:
        return f"refused: {error}", False
    proof = f"{append.proof} as user" if append.adapt == "user" else append.proof
    return proof, probe.varies(append, reply, messages, tools)


def _switches(
    probe: TemplateProbe, thinking: Mapping[str, bool], prefix: str, variables: frozenset[str]
) -> dict[str, str]:
    """Return the effects of the template's settings, each set to true and false."""
    effects_by_setting: dict[str, str] = {}
    for name in sorted(variables - _NOT_SETTINGS - set(_CLOCKS)):
        if name.endswith("_token"):
            continue
        for value in (True, False):
            twin = _TemplateQueries(
                probe, probe.template.with_message_format(variables={name: value})
            )
            try:
                thinking_then = twin.thinking()
                prefix_then = twin.prefix()
            except (TemplateError, TypeError):
                continue

            effects = []
            if thinking_then["user"] and not thinking["user"]:
                effects.append("keeps thinking")
            elif thinking["user"] and not thinking_then["user"]:
                effects.append("strips thinking")
            if prefix_then != prefix:
                effects.append(f"opens a reply with {prefix_then!r}")
            if effects:
                effects_by_setting[f"{name}={str(value).lower()}"] = ", ".join(effects)
    return effects_by_setting


def _seams(probe: TemplateProbe, codec: Tokenizer) -> tuple[str, ...]:
    """Return the seams at which encoding the parts gives other ids than encoding the complete
    text."""
    asked = Message("user", "Go on.")
    try:
        prompt = probe.template.render((asked,), generation_prompt=True)
        append = probe.append(Message("assistant", "reply"), [asked])
        rest = probe.rendered(append, [asked])
    except TemplateError:
        return ()

    stop = append.head if append.head in codec.control else ""
    seams = []
    for name, left, right, after in (
        ("prompt | reply", prompt, "Well", ""),
        ("prompt | a reply that begins with a line break", prompt, "\n\nWell", ""),
        ("reply | what follows", f"Well{append.head}", rest, stop),
    ):
        if codec.encode(left) + codec.encode_after(right, after) != codec.encode(left + right):
            seams.append(name)
    if codec.inexact_reason:
        seams.append(codec.inexact_reason)
    return tuple(seams)


# In words


def explain_contract(
    contract: TemplateContract, history: str = "append"
) -> list[tuple[bool | None, str]]:
    """Explain the contract, for a history mode, as lines.

    A line is a text, and whether what it says is good: None for a remark. The last one says
    whether the history mode can be exact.
    """
    return [
        *((None, text) for text in _remarks_on_replies(contract)),
        *(_append_row(scenario, proof) for scenario, proof in contract.appends.items()),
        *((None, text) for text in _remarks_on_conversations(contract)),
        _verdict(contract, history),
    ]


def _remarks_on_replies(contract: TemplateContract) -> list[str]:
    """Describe how a reply ends, opens and thinks, and the settings of the template."""
    remarks = [f"class: {contract.kind}{_flags(contract)}"]

    ends = ", ".join(map(repr, contract.stops))
    if not ends:
        ends = f"plain text {contract.close!r}: give stop strings (rollout.stop)"
    header = ", the header of the next message" if contract.heads else ""
    remarks.append(f"a reply ends with {ends}{header}")
    if contract.tail:
        remarks.append(
            f"after it the template writes {contract.tail!r}, which is never sampled: it "
            "begins the next append"
        )

    opened = " (thinking is already open)" if contract.thinks else ""
    remarks.append(f"a reply is opened by {contract.prefix!r}{opened}")

    if not all(contract.thinking.values()):
        kept = [role for role in ("user", "tool") if contract.thinking[role]]
        dropped = [role for role in ("user", "tool") if not contract.thinking[role]]
        where = f"kept before {' and '.join(kept)} messages" if kept else "never kept"
        if kept and dropped:
            where += f", dropped before {' '.join(dropped)}"
        remarks.append(f"thinking is {where}")

    for setting, effect in contract.switches.items():
        remarks.append(f"[model.template_args] {setting}: {effect}")
    return remarks


def _remarks_on_conversations(contract: TemplateContract) -> list[str]:
    """Describe what depends on the rest of a conversation, on a clock, or on the tokenizer."""
    remarks = []
    if contract.stateful:
        scenarios = " and of ".join(contract.stateful)
        remarks.append(
            f"the appended text of {scenarios} depends on earlier turns: it is derived for each "
            "shape of conversation"
        )
    if contract.moves_text:
        remarks.append(
            "the text of a reply with calls moves after their results; in an append it stays "
            "where it was sampled"
        )
    if contract.tool_images is False:
        remarks.append(
            "tool messages lose their images: they are moved to a user message after it "
            "(tool_media_moved)"
        )
    if contract.system != "shown":
        where = " to the last user message" if contract.system == "moved" else ""
        remarks.append(f"a system message is {contract.system}{where}")
    remarks += [f"depends on {name}: frozen during a run" for name in contract.impure]
    remarks += [f"encoded separately, other ids at: {seam}" for seam in contract.seams]
    return remarks


def _flags(contract: TemplateContract) -> str:
    flags = {
        "swaps the close": contract.swaps_close and contract.kind != "swaps the close",
        "prefilled": contract.prefilled and contract.kind != "prefilled",
        "folds tools": contract.folds_tools,
        "impure": bool(contract.impure),
    }
    return "".join(f", {name}" for name, holds in flags.items() if holds)


def _append_row(scenario: str, proof: str) -> tuple[bool | None, str]:
    if proof.startswith("refused"):
        return None, f"appending {scenario} is {proof}"

    words = {
        "append": "is exact: all earlier text stays",
        "tail": "is exact from the reply on; the template would render something earlier "
        "differently, which is kept as it was",
        "swap": "is exact after the reply; the template would close the reply differently, and "
        "the sampled close is kept",
    }
    proof, _, as_user = proof.partition(" ")
    note = ""
    if as_user:
        note = "; tool results are rendered as user text, because the template does not render them"
    return True, f"appending {scenario} {words[proof]}{note}"


def _verdict(contract: TemplateContract, history: str) -> tuple[bool | None, str]:
    """Return whether the history mode can be exact."""
    refused = all(contract.appends[scenario].startswith("refused") for scenario in ("user", "tool"))
    if history == "append" and refused:
        return False, 'history = "append" cannot be exact: nothing can follow a reply; use "inline"'
    if history == "template" and refused:
        return (
            False,
            'history = "template" cannot be exact: the template rejects all messages after a '
            'reply; use "inline"',
        )

    if history == "template":
        cost = "branches where earlier replies are rendered differently"
        if contract.append_only:
            cost = "never branches"
        return True, f'history = "template" is exact: it {cost}'

    if history == "inline":
        ends = "replies end by stop strings alone"
        if contract.stops:
            ends = "give stop strings (rollout.stop) that end a step"
        return True, f'history = "inline" is exact; {ends}'

    stays = "" if contract.append_only else ": earlier turns stay as they were sampled"
    return True, f'history = "{history}" is exact{stays}'
