"""The template contract, derived by probing, and its explanation in words."""

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
_GIVEN = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
    "namespace",
    "range",
}
_CLOCKS = ("strftime_now",)
_MAX_TURNS, _MAX_REPLIES = 24, 12
"""Turns of the longest probed conversation, which detects windows, and the number of its
last replies to check."""


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
        """Whether all earlier text stays unchanged, so that a conversation only grows
        in `template` mode too."""
        return self.kind == "append-only"


def derive_contract(probe: TemplateProbe, codec: Tokenizer, *, thinks: bool) -> TemplateContract:
    """Derive the contract of a template by probing; `thinks` if replies are parsed as
    starting inside the thinking.

    Raises `TemplateError` if the template cannot render a reply to a user.
    """
    template = probe.template
    queries = _TemplateQueries(probe)
    thinking = queries.thinking()
    thought = "thought" if queries.has_reasoning_field else None
    found = {name: _append_proof(probe, roles, thought) for name, roles in SCENARIOS.items()}
    appends = {name: proof for name, (proof, _) in found.items()}
    prefix, prefilled = queries.prefix(), not queries.continues()
    variables = template.parameters
    tail = probe.text.last[len(probe.text.close_in_last) :]
    kind = "splits replies"
    if not queries.splits():
        kind = _kind(thinking, appends, prefilled, queries.keeps_results(), queries.moves_tools())
    if kind in ("append-only", "prefilled") and not queries.grows():
        kind = "strips older" if queries.grows(thinking=False) else "rewrites messages"
    return TemplateContract(
        kind=kind,
        prefilled=prefilled,
        swaps_close=appends["user"].startswith("swap"),
        folds_tools=queries.folds_tools(),
        stops=probe.stops,
        heads=probe.text.heads,
        close=probe.text.head,
        last=probe.text.last,
        tail=tail,
        prefix=prefix,
        thinks=thinks,
        thinking=thinking,
        switches=_switches(probe, thinking, prefix, variables),
        appends=appends,
        stateful=tuple(name for name, (_, varies) in found.items() if varies),
        roles=tuple(
            role for role in ("user", "tool", "system", "assistant") if queries.follows(role)
        ),
        moves_text=queries.moves_text(),
        tool_images=queries.tool_images(),
        system=queries.system(),
        default_system=queries.default_system(),
        impure=tuple(name for name in _CLOCKS if re.search(rf"\b{name}\b", template.source)),
        seams=_seams(probe, codec),
    )


class _TemplateQueries:
    """Queries of a template, each answered by one or two renderings."""

    def __init__(self, probe: TemplateProbe, template: ChatTemplate | None = None) -> None:
        self.probe = probe
        self.template = template or probe.template
        self.has_reasoning_field = False

    def render(self, *messages: Message, prompt: bool = False) -> str:
        """Render messages, with a tool schema where required; empty if the
        template rejects them."""
        called = any(m.tool_calls or m.role == "tool" for m in messages)
        for tools in (PROBE_TOOLS, ()) if called else ((), PROBE_TOOLS):
            if (
                text := self.template.try_render(messages, tools, generation_prompt=prompt)
            ) is not None:
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
        """Return whether the text of `before` begins that of `after`; None if the
        template rejects one of them."""
        first = self.template.try_render(before, tools, generation_prompt=prompt)
        full = self.template.try_render(after, tools)
        return None if first is None or full is None else full.startswith(first)

    def thinking(self) -> dict[str, bool]:
        """Return whether thinking is rendered, by what follows it: in its own
        field, else in the text."""
        in_field = self._thinking(lambda thought: {"reasoning": thought}, "")
        self.has_reasoning_field = any(in_field.values())
        if self.has_reasoning_field:
            return in_field
        text = random_mark()
        return self._thinking(
            lambda thought: {"content": f"<think>\n{thought}\n</think>\n\n{text}"}, text
        )

    def _thinking(self, fields: Callable[[str], Mapping[str, Any]], text: str) -> dict[str, bool]:
        """Return whether a thought is rendered; a thought inside a text counts as
        rendered if the text is not."""
        thought = random_mark()
        reply = replace(Message("assistant", "reply"), **fields(thought))
        called = replace(Message("assistant", "", (PROBE_CALL,)), **fields(thought))

        def kept(*messages: Message) -> bool:
            rendered = self.render(*messages, prompt=len(messages) > 2)
            return thought in rendered or bool(text and text not in rendered)

        result = probe_result("result")
        return {
            "last": kept(ASKED, reply),
            "user": kept(ASKED, reply, ASKED),
            "tool": kept(ASKED, called, result),
        }

    def prefix(self) -> str:
        """Return the text that opens a reply: the generation prompt, else the text between a
        question and its answer."""
        without, prompted = (
            self.template.render((ASKED,)),
            self.template.render((ASKED,), generation_prompt=True),
        )
        if prompted != without:
            pieces, others = (self.probe.split.split(text) for text in (prompted, without))
            same = next(
                (i for i, (a, b) in enumerate(zip(pieces, others, strict=False)) if a != b),
                len(others),
            )
            if same < len(others):
                start = (
                    common_prefix_length(pieces[same], others[same])
                    if pieces[same] not in self.probe.control
                    else 0
                )
                pieces[same] = pieces[same][start:]
            return "".join(pieces[same:])
        one, other = random_mark(), random_mark()
        between, found, _ = (
            self.render(Message("user", one), Message("assistant", other))
            .rpartition(one)[2]
            .partition(other)
        )
        return between if found else ""

    def continues(self) -> bool:
        """Return whether finished replies of every kind are rendered after the generation prompt
        they were sampled after."""
        for calls in ((), (PROBE_CALL,)):
            for thought in (None, "thought") if self.has_reasoning_field else (None,):
                reply = Message(
                    "assistant", "" if calls else "reply", tool_calls=calls, reasoning=thought
                )
                if (
                    self._stays((ASKED,), (ASKED, reply), PROBE_TOOLS if calls else (), prompt=True)
                    is False
                ):
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
        """Return whether a message after a reply is rendered the same once the
        next reply follows it."""
        answer = Message(
            "assistant", "reply", reasoning="thought" if self.has_reasoning_field else None
        )
        called = (ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result("result"))
        for rows, tools in (((ASKED, answer, ASKED), ()), (called, PROBE_TOOLS)):
            replies = (answer, replace(answer, reasoning=None))
            if [self._stays(rows, (*rows, reply), tools, prompt=True) for reply in replies] == [
                False,
                False,
            ]:
                return False
        return True

    def grows(self, *, thinking: bool = True) -> bool:
        """Return whether all text stays in long conversations with calls, a system
        message and thinking."""
        for messages in (
            *CONVERSATIONS,
            (ASKED, Message("assistant", "a")) * _MAX_TURNS + (ASKED,),
        ):
            rows = messages if thinking else [replace(m, reasoning=None) for m in messages]
            tools = PROBE_TOOLS if any(m.role == "tool" for m in rows) else ()
            ends = [number + 1 for number, m in enumerate(rows) if m.role == "assistant"]
            full = self.template.try_render(rows, tools, generation_prompt=True)
            for end in ends[-_MAX_REPLIES:]:
                text = self.template.try_render(rows[:end], tools)
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
        if (
            prompted is None
            or rendered is None
            or not rendered.startswith(prompted)
            or argument not in rendered
        ):
            return False
        reply = rendered[len(prompted) :].partition(argument)[0]
        return any(stop in reply for stop in self.probe.text.stops)

    def folds_tools(self) -> bool:
        """Return whether a second tool result changes the rendering of the first."""
        calls = tuple(ToolCall("f", {"x": str(i)}, call_id(i)) for i in range(2))
        base = (ASKED, Message("assistant", "", calls), probe_result("result 0"))
        one, both = self.render(*base), self.render(*base, probe_result("result 1", 1))
        return bool(one) and bool(both) and not both.startswith(one)

    def moves_text(self) -> bool:
        """Return whether the text of a reply with calls is rendered after their results."""
        text, result = random_mark(), random_mark()
        rendered = self.render(
            ASKED, Message("assistant", text, (PROBE_CALL,)), probe_result(result), prompt=True
        )
        return 0 <= rendered.find(result) < rendered.find(text)

    def follows(self, role: str) -> bool:
        """Return whether a message of a role can follow a reply."""
        text = random_mark()
        reply, message = Message("assistant", "reply"), Message(role, text)
        if role == "tool":
            reply, message = Message("assistant", "", (PROBE_CALL,)), probe_result(text)
        return text in self.render(ASKED, reply, message, prompt=True)

    def system(self) -> str:
        """Return the handling of a system message."""
        text = random_mark()
        asked = (Message("system", text), ASKED)
        rendered = self.render(*asked, prompt=True)
        later = self.render(
            *asked, Message("assistant", reply := random_mark()), ASKED, prompt=True
        )
        if text in rendered and text in later.partition(reply)[2]:
            return "moved"
        return "shown" if text in rendered else "dropped" if rendered else "refused"

    def default_system(self) -> bool:
        """Return whether the template writes more without a system message
        than with an empty one."""
        bare = self.render(ASKED, prompt=True)
        empty, own = (
            self.render(Message("system", text), ASKED, prompt=True) for text in ("", "s")
        )
        return bool(own) and len(bare) > len(empty) > 0

    def tool_images(self) -> bool | None:
        """Return whether an image in a tool message is rendered."""
        image = ImageRef("0" * 64)
        twin = _TemplateQueries(self.probe, self.template.with_message_format(parts=True))

        def gains(*base: Message) -> bool:
            with_image = Message(
                base[-1].role, (image, "t"), tool_call_id=base[-1].tool_call_id, name=base[-1].name
            )
            rendered, bare = twin.render(*base[:-1], with_image), twin.render(*base)
            return (
                bool(rendered) and rendered != bare and image.sha256 not in rendered
            )  # else the list was printed as is

        if not gains(Message("user", "t")):
            return None
        return gains(ASKED, Message("assistant", "", (PROBE_CALL,)), probe_result("t"))


def _kind(
    thinking: Mapping[str, bool],
    appends: Mapping[str, str],
    prefilled: bool,
    kept: bool,
    moved: bool,
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
    if moved:
        return "moves tools"
    return "append-only" if kept else "rewrites messages"


def _append_proof(
    probe: TemplateProbe, roles: Sequence[str], thought: str | None
) -> tuple[str, bool]:
    """Return how messages of these roles are appended to a reply, and whether that
    depends on earlier turns."""
    calls = tuple(
        ToolCall("f", {"x": "1"}, call_id(i)) for i, role in enumerate(roles) if role == "tool"
    )
    reply = Message("assistant", "" if calls else "reply", tool_calls=calls, reasoning=thought)
    messages = [
        probe_result("t", i) if role == "tool" else Message(role, "t")
        for i, role in enumerate(roles)
    ]
    try:
        found = probe.append(reply, messages, tools := PROBE_TOOLS if calls else ())
    except TemplateError as error:
        return f"refused: {error}", False
    varies = probe.varies(found, reply, messages, tools)
    return f"{found.proof} as user" if found.adapt == "user" else found.proof, varies


def _switches(
    probe: TemplateProbe, thinking: Mapping[str, bool], prefix: str, variables: frozenset[str]
) -> dict[str, str]:
    """Return the effects of the template's settings, each set to true and false."""
    found: dict[str, str] = {}
    for name in sorted(variables - _GIVEN - set(_CLOCKS)):
        if name.endswith("_token"):
            continue
        for value in (True, False):
            twin = _TemplateQueries(
                probe, probe.template.with_message_format(variables={name: value})
            )
            try:
                now, opened = twin.thinking(), twin.prefix()
            except (TemplateError, TypeError):
                continue
            effects = []
            if now["user"] and not thinking["user"]:
                effects.append("keeps thinking")
            elif thinking["user"] and not now["user"]:
                effects.append("strips thinking")
            if opened != prefix:
                effects.append(f"opens a reply with {opened!r}")
            if effects:
                found[f"{name}={str(value).lower()}"] = ", ".join(effects)
    return found


def _seams(probe: TemplateProbe, codec: Tokenizer) -> tuple[str, ...]:
    """Return the seams at which encoding the parts gives other ids than
    encoding the complete text."""
    asked = Message("user", "Go on.")
    try:
        prompt = probe.template.render((asked,), generation_prompt=True)
        append = probe.append(Message("assistant", "reply"), [asked])
        rest = probe.rendered(append, [asked])
    except TemplateError:
        return ()
    found = []
    for name, left, right in (
        ("prompt | reply", prompt, "Well"),
        ("prompt | a reply that begins with a line break", prompt, "\n\nWell"),
        ("reply | what follows", f"Well{append.head}", rest),
    ):
        after = append.head if name.startswith("reply") and append.head in codec.control else ""
        if codec.encode(left) + codec.encode_after(right, after) != codec.encode(left + right):
            found.append(name)
    return (*found, codec.inexact_reason) if codec.inexact_reason else tuple(found)


def explain_contract(
    contract: TemplateContract, history: str = "append"
) -> list[tuple[bool | None, str]]:
    """Explain the contract, for a history mode, as lines: (whether it is good,
    None for a remark; text)."""
    rows: list[tuple[bool | None, str]] = [(None, f"class: {contract.kind}{_flags(contract)}")]
    ends = (
        ", ".join(map(repr, contract.stops))
        or f"plain text {contract.close!r}: give stop strings (rollout.stop)"
    )
    rows.append(
        (
            None,
            "a reply ends with "
            f"{ends}{', the header of the next message' if contract.heads else ''}",
        )
    )
    if contract.tail:
        after = (
            f"after it the template writes {contract.tail!r}, which is never sampled: it "
            "begins the next append"
        )
        rows.append((None, after))
    opened = " (thinking is already open)" if contract.thinks else ""
    rows.append((None, f"a reply is opened by {contract.prefix!r}{opened}"))
    if not all(contract.thinking.values()):
        kept = [name for name in ("user", "tool") if contract.thinking[name]]
        dropped = [name for name in ("user", "tool") if not contract.thinking[name]]
        where = f"kept before {' and '.join(kept)} messages" if kept else "never kept"
        rows.append(
            (
                None,
                "thinking is "
                f"{where}{f', dropped before {chr(32).join(dropped)}' if kept and dropped else ''}",
            )
        )
    rows += [
        (None, f"[model.template_args] {name}: {effect}")
        for name, effect in contract.switches.items()
    ]
    rows += [_append_row(name, proof) for name, proof in contract.appends.items()]
    if contract.stateful:
        names = " and of ".join(contract.stateful)
        rows.append(
            (
                None,
                f"the appended text of {names} depends on earlier turns: it is derived for each "
                "shape of conversation",
            )
        )
    if contract.moves_text:
        moved = (
            "the text of a reply with calls moves after their results; in an append it stays "
            "where it was sampled"
        )
        rows.append((None, moved))
    if contract.tool_images is False:
        rows.append(
            (
                None,
                "tool messages lose their images: they are moved to a user message after it "
                "(tool_media_moved)",
            )
        )
    if contract.system != "shown":
        where = " to the last user message" if contract.system == "moved" else ""
        rows.append((None, f"a system message is {contract.system}{where}"))
    rows += [(None, f"depends on {name}: frozen during a run") for name in contract.impure]
    rows += [(None, f"encoded separately, other ids at: {name}") for name in contract.seams]
    rows.append(_verdict(contract, history))
    return rows


def _flags(contract: TemplateContract) -> str:
    flags = {
        "swaps the close": contract.swaps_close and contract.kind != "swaps the close",
        "prefilled": contract.prefilled and contract.kind != "prefilled",
        "folds tools": contract.folds_tools,
        "impure": bool(contract.impure),
    }
    return "".join(f", {name}" for name, holds in flags.items() if holds)


def _append_row(name: str, proof: str) -> tuple[bool | None, str]:
    if proof.startswith("refused"):
        return None, f"appending {name} is {proof}"
    words = {
        "append": "is exact: all earlier text stays",
        "tail": "is exact from the reply on; the template would render something earlier "
        "differently, which is kept as it was",
        "swap": "is exact after the reply; the template would close the reply differently, and "
        "the sampled close is kept",
    }
    proof, _, as_user = proof.partition(" ")
    note = (
        "; tool results are rendered as user text, because the template does not render them"
        if as_user
        else ""
    )
    return True, f"appending {name} {words[proof]}{note}"


def _verdict(contract: TemplateContract, history: str) -> tuple[bool | None, str]:
    """Return whether the history mode can be exact."""
    refused = contract.appends["user"].startswith("refused") and contract.appends[
        "tool"
    ].startswith("refused")
    if history == "append" and refused:
        return False, 'history = "append" cannot be exact: nothing can follow a reply; use "inline"'
    if history == "template" and refused:
        return (
            False,
            'history = "template" cannot be exact: the template rejects all messages after a '
            'reply; use "inline"',
        )
    if history == "template":
        cost = (
            "never branches"
            if contract.append_only
            else "branches where earlier replies are rendered differently"
        )
        return True, f'history = "template" is exact: it {cost}'
    if history == "inline":
        ends = (
            "give stop strings (rollout.stop) that end a step"
            if contract.stops
            else "replies end by stop strings alone"
        )
        return True, f'history = "inline" is exact; {ends}'
    stays = "" if contract.append_only else ": earlier turns stay as they were sampled"
    return True, f'history = "{history}" is exact{stays}'
