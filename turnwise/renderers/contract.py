"""The template contract derived by probing, also in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from turnwise.errors import TemplateError
from turnwise.renderers.control_text import random_mark
from turnwise.renderers.probe import CONVERSATIONS, TemplateProbe, common_prefix, text_between
from turnwise.renderers.template import PROBE_TOOLS, ChatTemplate, call_id
from turnwise.types import ImageRef, Message, ToolCall

if TYPE_CHECKING:
    from turnwise.renderers.tokenizer import Tokenizer


SCENARIOS: Mapping[str, tuple[str, ...]] = {"user": ("user",), "tool": ("tool",), "tool, user": ("tool", "user")}
"""Appends that are tried, by name: the roles of the messages behind a reply."""
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
_CLOCKS = ("strftime_now",)
_MOST_TURNS, _MOST_REPLIES = 24, 12
"""Turns of the longest conversation that is tried, for windows, and the replies of one that are looked for."""


@dataclass(frozen=True, slots=True)
class TemplateContract:
    """What a chat template does with a conversation that grows."""

    kind: str
    """Its class: `append-only`; `strips on user`, `strips on tool` or `strips always` (thinking of earlier turns);
    `swaps the close`; `splits replies` (one with calls is shown as two messages, so that it would stop in between);
    `rewrites messages` (an earlier one is shown in another way once something follows); `moves tools` (their description goes
    to the user's last message); `strips older` (thinking of replies further back); `prefilled` (see that field)."""
    prefilled: bool
    """Whether some kind of finished reply is not shown behind the generation prompt that it was sampled behind."""
    swaps_close: bool
    """Whether a reply is closed in another way once something follows it."""
    folds_tools: bool
    """Whether results of tools that follow each other become one message, so that they have to be appended at once."""
    stops: tuple[str, ...]
    """Control tokens that end a reply, as texts."""
    heads: bool
    """Whether a reply ends in the header of the message that follows."""
    close: str
    """What stands behind a reply's text in the middle of a conversation, up to its stop."""
    last: str
    """What stands behind the last reply of a conversation."""
    tail: str
    """What the template writes behind the stop by itself: nobody samples it."""
    prefix: str
    """What opens a reply, the generation prompt."""
    thinks: bool
    """Whether the generation prompt has opened the thinking already."""
    thinking: Mapping[str, bool]
    """Whether a reply's thinking is shown: `last` where nothing follows, `user` and `tool` where such a message does."""
    switches: Mapping[str, str]
    """Settings of the template and what they change."""
    appends: Mapping[str, str]
    """By scenario: `append`, `tail`, `swap` (see `AppendProbe.proof`), with `as user` where results of tools have to be shown
    as a user's words; or `refused: why`."""
    stateful: tuple[str, ...]
    """Scenarios in which what is appended depends on earlier turns (a counter, a flag, a window, a system message that moves):
    it is worked out behind each conversation."""
    roles: tuple[str, ...]
    """Roles that may follow a reply."""
    tool_images: bool | None
    """Whether a tool's message keeps its images; None where no message does."""
    system: str
    """What becomes of a system message: `shown`, `dropped`, `refused`, or `moved` (to the user's last message)."""
    default_system: bool
    """Whether the template writes something in front of a conversation that has no system message."""
    impure: tuple[str, ...]
    """What the rendering depends on besides the conversation (`strftime_now`: the date); it is frozen while a run lasts."""
    seams: tuple[str, ...]
    """Where encoding piece by piece differs from encoding the whole with this tokenizer."""

    @property
    def append_only(self) -> bool:
        """Whether every earlier byte stays, so that a conversation only grows in `template` mode too."""
        return self.kind == "append-only"


def derive_contract(probe: TemplateProbe, codec: Tokenizer, *, thinks: bool) -> TemplateContract:
    """Probe a template.

    Args:
        probe: of the template, in the form that it reads.
        codec: the tokenizer, for what holds of ids.
        thinks: whether replies are read as beginning inside the thinking.

    Raises:
        TemplateError: when the template cannot show a reply to a user.
    """
    template = probe.template
    shown = _TemplateQueries(probe)
    thinking = shown.thinking()
    thought = "thought" if shown.shows_field else None
    found = {name: _appended(probe, roles, thought) for name, roles in SCENARIOS.items()}
    appends = {name: proof for name, (proof, _) in found.items()}
    prefix, prefilled = shown.prefix(), not shown.continues()
    variables = template.parameters
    tail = probe.text.last[len(probe.text.close_in_last) :]
    kind = "splits replies"
    if not shown.splits():
        kind = _kind(thinking, appends, prefilled, shown.keeps_results(), shown.moves_tools())
    if kind in ("append-only", "prefilled") and not shown.grows():
        kind = "strips older" if shown.grows(thinking=False) else "rewrites messages"
    return TemplateContract(
        kind=kind,
        prefilled=prefilled,
        swaps_close=appends["user"].startswith("swap"),
        folds_tools=shown.folds_tools(),
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
        roles=tuple(role for role in ("user", "tool", "system", "assistant") if shown.follows(role)),
        tool_images=shown.tool_images(),
        system=shown.system(),
        default_system=shown.default_system(),
        impure=tuple(name for name in _CLOCKS if re.search(rf"\b{name}\b", template.source)),
        seams=_seams(probe, codec),
    )


class _TemplateQueries:
    """Questions put to a template, each answered by a rendering or two."""

    def __init__(self, probe: TemplateProbe, template: ChatTemplate | None = None) -> None:
        self.probe = probe
        self.template = template or probe.template
        self.shows_field = False
        self.call = ToolCall("f", {"x": "1"}, call_id(0))
        self.answer = Message("tool", "result", tool_call_id=call_id(0), name="f")

    def render(self, *messages: Message, prompt: bool = False) -> str:
        """As the template shows them, told of a tool where it must be; empty where it refuses."""
        called = any(m.tool_calls or m.role == "tool" for m in messages)
        for tools in (PROBE_TOOLS, ()) if called else ((), PROBE_TOOLS):
            try:
                return self.template.render(messages, tools, generation_prompt=prompt)
            except TemplateError:
                continue
        return ""

    def thinking(self) -> dict[str, bool]:
        """Whether thinking is shown, by what follows it: given in a field of its own, else written into the text."""
        field = self._thinking(lambda thought: {"reasoning": thought}, "")
        self.shows_field = any(field.values())
        if self.shows_field:
            return field
        said = random_mark()
        return self._thinking(lambda thought: {"content": f"<think>\n{thought}\n</think>\n\n{said}"}, said)

    def _thinking(self, given: Callable[[str], Mapping[str, Any]], said: str) -> dict[str, bool]:
        """Whether a thought is shown; one that stands in a text counts as shown where the text is not."""
        thought = random_mark()
        asked = Message("user", "u")
        reply = replace(Message("assistant", "said"), **given(thought))
        called = replace(Message("assistant", "", tool_calls=(self.call,)), **given(thought))

        def kept(*messages: Message) -> bool:
            shown = self.render(*messages, prompt=len(messages) > 2)
            return thought in shown or bool(said and said not in shown)

        return {"last": kept(asked, reply), "user": kept(asked, reply, asked), "tool": kept(asked, called, self.answer)}

    def prefix(self) -> str:
        """What opens a reply: what the generation prompt adds, else what stands between a question and its answer."""
        asked = (Message("user", "u"),)
        without, prompted = self.template.render(asked), self.template.render(asked, generation_prompt=True)
        if prompted != without:
            pieces, others = (self.probe.split.split(text) for text in (prompted, without))
            same = next((i for i, (a, b) in enumerate(zip(pieces, others, strict=False)) if a != b), len(others))
            if same < len(others):
                start = len(common_prefix(pieces[same], others[same])) if pieces[same] not in self.probe.control else 0
                pieces[same] = pieces[same][start:]
            return "".join(pieces[same:])
        one, other = random_mark(), random_mark()
        return text_between(self.render(Message("user", one), Message("assistant", other)), one, other)

    def continues(self) -> bool:
        """Whether finished replies of every kind are shown behind the generation prompt that they were sampled behind."""
        asked = Message("user", "u")
        for calls in ((), (self.call,)):
            tools = PROBE_TOOLS if calls else ()
            for thought in (None, "thought") if self.shows_field else (None,):
                reply = Message("assistant", "" if calls else "said", tool_calls=calls, reasoning=thought)
                with suppress(TemplateError):
                    prompted = self.template.render((asked,), tools, generation_prompt=True)
                    if not self.template.render((asked, reply), tools).startswith(prompted):
                        return False
        return True

    def moves_tools(self) -> bool:
        """Whether the description of tools goes to another place once a user speaks again."""
        asked = Message("user", "u")
        base = (asked, Message("assistant", "said"))
        with suppress(TemplateError):
            shown = self.template.render(base, PROBE_TOOLS)
            told = shown != self.template.render(base)
            return told and not self.template.render((*base, Message("user", "on")), PROBE_TOOLS).startswith(shown)
        return False

    def keeps_results(self) -> bool:
        """Whether what the world said behind a reply is shown in the same way once the next reply follows it."""
        asked, said = Message("user", "u"), Message("assistant", "said", reasoning="thought" if self.shows_field else None)
        called = Message("assistant", "", tool_calls=(self.call,))
        for rows, tools in (((asked, said, asked), ()), ((asked, called, self.answer), PROBE_TOOLS)):
            with suppress(TemplateError):
                prompted = self.template.render(rows, tools, generation_prompt=True)
                shown = [self.template.render((*rows, reply), tools) for reply in (said, replace(said, reasoning=None))]
                if not any(text.startswith(prompted) for text in shown):
                    return False
        return True

    def grows(self, *, thinking: bool = True) -> bool:
        """Whether all that was shown stays in conversations of many turns, with calls, a system message, and thinking."""
        user = Message("user", "u")
        for messages in (*CONVERSATIONS, (user, Message("assistant", "a")) * _MOST_TURNS + (user,)):
            rows = messages if thinking else [replace(m, reasoning=None) for m in messages]
            tools = PROBE_TOOLS if any(m.role == "tool" for m in rows) else ()
            ends = [number + 1 for number, m in enumerate(rows) if m.role == "assistant"]
            with suppress(TemplateError):
                whole = self.template.render(rows, tools, generation_prompt=True)
                if any(not whole.startswith(self.template.render(rows[:end], tools)) for end in ends[-_MOST_REPLIES:]):
                    return False
        return True

    def splits(self) -> bool:
        """Whether a reply's text is closed before its calls begin."""
        asked, argument = Message("user", "u"), random_mark()
        called = Message("assistant", "", tool_calls=(replace(self.call, arguments={"x": argument}),))
        try:
            prompted = self.template.render((asked,), PROBE_TOOLS, generation_prompt=True)
            shown = self.template.render((asked, called), PROBE_TOOLS)
        except TemplateError:
            return False
        if not shown.startswith(prompted) or argument not in shown:
            return False
        reply = shown[len(prompted) :].partition(argument)[0]
        return any(stop in reply for stop in self.probe.text.stops)

    def folds_tools(self) -> bool:
        """Whether a second result of a tool changes how the first is shown."""
        calls = tuple(ToolCall("f", {"x": str(i)}, call_id(i)) for i in range(2))
        answers = [Message("tool", f"result {i}", tool_call_id=call_id(i), name="f") for i in range(2)]
        base = (Message("user", "u"), Message("assistant", "", tool_calls=calls))
        one, both = self.render(*base, answers[0]), self.render(*base, *answers)
        return bool(one) and bool(both) and not both.startswith(one)

    def follows(self, role: str) -> bool:
        """Whether a message of a role may stand behind a reply, shown as such."""
        text = random_mark()
        message = Message(role, text, tool_call_id=call_id(0) if role == "tool" else None, name="f" if role == "tool" else None)
        reply = Message("assistant", "", tool_calls=(self.call,)) if role == "tool" else Message("assistant", "said")
        return text in self.render(Message("user", "u"), reply, message, prompt=True)

    def system(self) -> str:
        """What becomes of a system message."""
        text = random_mark()
        asked = (Message("system", text), Message("user", "u"))
        shown = self.render(*asked, prompt=True)
        later = self.render(*asked, Message("assistant", said := random_mark()), Message("user", "u"), prompt=True)
        if text in shown and text in later.partition(said)[2]:
            return "moved"
        return "shown" if text in shown else "dropped" if shown else "refused"

    def default_system(self) -> bool:
        """Whether a conversation without a system message begins with something that one with an empty system message lacks."""
        bare = self.render(Message("user", "u"), prompt=True)
        empty = self.render(Message("system", ""), Message("user", "u"), prompt=True)
        own = self.render(Message("system", "s"), Message("user", "u"), prompt=True)
        return bool(own) and len(bare) > len(empty) > 0

    def tool_images(self) -> bool | None:
        """Whether an image in a tool's message is shown."""
        image = ImageRef("0" * 64)
        twin = _TemplateQueries(self.probe, self.template.with_message_format(parts=True))

        def gains(*base: Message) -> bool:
            with_image = Message(base[-1].role, (image, "t"), tool_call_id=base[-1].tool_call_id, name=base[-1].name)
            shown, bare = twin.render(*base[:-1], with_image), twin.render(*base)
            return bool(shown) and shown != bare and image.sha256 not in shown  # else a list was written out as it is

        asked, called = Message("user", "u"), Message("assistant", "", tool_calls=(self.call,))
        if not gains(Message("user", "t")):
            return None
        return gains(asked, called, Message("tool", "t", tool_call_id=call_id(0), name="f"))


def _kind(thinking: Mapping[str, bool], appends: Mapping[str, str], prefilled: bool, kept: bool, moved: bool) -> str:
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


def _appended(probe: TemplateProbe, roles: Sequence[str], thought: str | None) -> tuple[str, bool]:
    """How messages of these roles are appended behind a reply that calls for them, and whether earlier turns count in it."""
    calls = tuple(ToolCall("f", {"x": "1"}, call_id(i)) for i, role in enumerate(roles) if role == "tool")
    reply = Message("assistant", "" if calls else "said", tool_calls=calls, reasoning=thought)
    messages = [
        Message(r, "t", tool_call_id=call_id(i), name="f") if r == "tool" else Message(r, "t") for i, r in enumerate(roles)
    ]
    try:
        found = probe.append(reply, messages, tools := PROBE_TOOLS if calls else ())
    except TemplateError as error:
        return f"refused: {error}", False
    varies = probe.varies(found, reply, messages, tools)
    return f"{found.proof} as user" if found.adapt == "user" else found.proof, varies


def _switches(probe: TemplateProbe, thinking: Mapping[str, bool], prefix: str, variables: frozenset[str]) -> dict[str, str]:
    """What settings of the template change, each tried on and off."""
    found: dict[str, str] = {}
    for name in sorted(variables - _GIVEN - set(_CLOCKS)):
        if name.endswith("_token"):
            continue
        for value in (True, False):
            twin = _TemplateQueries(probe, probe.template.with_message_format(variables={name: value}))
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
    """Seams at which encoding apart gives other ids than encoding the whole."""
    asked = Message("user", "Go on.")
    try:
        prompt = probe.template.render((asked,), generation_prompt=True)
        append = probe.append(Message("assistant", "said"), [asked])
        rest = probe.rendered(append, [asked])
    except TemplateError:
        return ()
    found = []
    for name, left, right in (
        ("prompt | reply", prompt, "Well"),
        ("prompt | a reply that begins with a line break", prompt, "\n\nWell"),
        ("reply | what follows", f"Well{append.head}", rest),
    ):
        behind = append.head if name.startswith("reply") and append.head in codec.control else ""
        if codec.encode(left) + codec.encode_after(right, behind) != codec.encode(left + right):
            found.append(name)
    return (*found, codec.inexact_reason) if codec.inexact_reason else tuple(found)


def to_row(contract: TemplateContract) -> dict[str, Any]:
    """The contract as JSON."""
    from dataclasses import asdict

    row = asdict(contract)
    return row | {"append_only": contract.append_only}


def explain_contract(contract: TemplateContract, history: str = "append") -> list[tuple[bool | None, str]]:
    """The contract in words: (whether it is as it should be, None for a remark; a line).

    Args:
        history: the mode that is asked for.
    """
    rows: list[tuple[bool | None, str]] = [(None, f"class: {contract.kind}{_flags(contract)}")]
    ends = ", ".join(map(repr, contract.stops)) or f"plain text {contract.close!r}: give stop strings (rollout.stop)"
    rows.append((None, f"a reply ends with {ends}{', the header of what follows' if contract.heads else ''}"))
    if contract.tail:
        rows.append((None, f"behind it the template writes {contract.tail!r}, which nobody samples: it begins the next append"))
    opened = " (thinking is open already)" if contract.thinks else ""
    rows.append((None, f"a reply is opened by {contract.prefix!r}{opened}"))
    if not all(contract.thinking.values()):
        kept = [name for name in ("user", "tool") if contract.thinking[name]]
        dropped = [name for name in ("user", "tool") if not contract.thinking[name]]
        said = f"kept behind {' and '.join(kept)} messages" if kept else "never kept"
        rows.append((None, f"thinking is {said}{f', dropped behind {chr(32).join(dropped)}' if kept and dropped else ''}"))
    rows += [(None, f"[model.template_args] {name}: {effect}") for name, effect in contract.switches.items()]
    for name, proof in contract.appends.items():
        rows.append(_append_row(name, proof))
    if contract.stateful:
        names = " and of ".join(contract.stateful)
        rows.append((None, f"what is appended of {names} depends on earlier turns: it is worked out behind each conversation"))
    if contract.tool_images is False:
        rows.append(
            (None, "a tool's message loses its images: they are shown in a user's message behind it (tool_media_moved)")
        )
    if contract.system != "shown":
        where = " to the user's last message" if contract.system == "moved" else ""
        rows.append((None, f"a system message is {contract.system}{where}"))
    rows += [(None, f"depends on {name}: frozen while a run lasts") for name in contract.impure]
    rows += [(None, f"encoded apart, other ids at: {name}") for name in contract.seams]
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
        "append": "is exact: all that was written before stays",
        "tail": "is exact from the reply on; something earlier would be shown in another way, and is kept as it was",
        "swap": "is exact behind the reply; the template would close the reply in another way, and what was sampled is kept",
    }
    proof, _, as_user = proof.partition(" ")
    told = "; results of tools are shown as a user's words, since the template does not show them" if as_user else ""
    return True, f"appending {name} {words[proof]}{told}"


def _verdict(contract: TemplateContract, history: str) -> tuple[bool | None, str]:
    """Whether the mode that is asked for can be exact."""
    refused = contract.appends["user"].startswith("refused") and contract.appends["tool"].startswith("refused")
    if history == "append" and refused:
        return False, 'history = "append" cannot be exact: nothing can follow a reply; use "inline"'
    if history == "template" and refused:
        return False, 'history = "template" cannot be exact: the template refuses whatever follows a reply; use "inline"'
    if history == "template":
        cost = "never branches" if contract.append_only else "branches where earlier replies are shown in another way"
        return True, f'history = "template" is exact: it {cost}'
    if history == "inline":
        ends = "give stop strings (rollout.stop) that end a step" if contract.stops else "replies end by stop strings alone"
        return True, f'history = "inline" is exact; {ends}'
    return True, f'history = "{history}" is exact' + (
        "" if contract.append_only else ": earlier turns stay as they were sampled"
    )
