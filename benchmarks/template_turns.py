"""Whole conversations with every chat template, held against transformers' own rendering; see `templates.py --turns`.

A reply is written as the template itself writes it where it comes last. In `append` mode what follows it has to be what
transformers writes behind the same conversation; in `template` mode the prompt has to be transformers' rendering of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from corpus import SPECIAL, TOOLS, tokenizer_of
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

from turnwise.errors import TemplateError
from turnwise.renderers import Branch, ChatRenderer, ChatTemplate, Extend, HFTokenizer, SampledReply
from turnwise.renderers.recompose import REASONS
from turnwise.renderers.template import ADAPT
from turnwise.types import Message, ToolCall

MARK = "80316420795318642075"
COUNTS = ("equal", "branched", "refused", "wrong", "unexplained", "crashes")
PLANS = {
    "all": ("user", "tool", "tools", "user", "tool user", "tool", "tools", "user", "user"),
    "tools": ("tool", "tools", "tool", "tool", "tools", "tool", "user"),
    "users": ("user",) * 7,
    "rounds": ("tool", "user", "tool", "user", "tool user", "tools", "user"),
}
"""What the world says behind each reply."""
THINKING = ("none", "full", "empty", "mixed")
ORDERS: dict[str, tuple[str | None, ...]] = {"none": (None,), "full": ("So.",), "empty": ("",), "mixed": ("So.", "", None)}


class Refused(Exception):
    """transformers cannot show a conversation."""


class Plan(NamedTuple):
    """One conversation."""

    plan: str
    thinking: str
    system: bool

    def __str__(self) -> str:
        return f"{self.plan}, thinking {self.thinking}{', system' if self.system else ''}"


def plans() -> list[Plan]:
    """All conversations: the one that has everything in each way, the others in half of the ways."""
    rows = product(PLANS, THINKING, (False, True))
    return [Plan(*row) for row in rows if row[0] == "all" or (row[1] in ("none", "mixed")) == row[2]]


@dataclass
class Tally:
    """What came of the turns of one template."""

    counts: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    faults: list[str] = field(default_factory=list)
    """What was wrong, unexplained or crashed."""

    def add(self, outcome: str, said: str = "") -> None:
        """Count an outcome, and keep what is said of a bad one."""
        self.counts[outcome] += 1
        if outcome in ("wrong", "unexplained", "crashes"):
            self.faults.append(f"{outcome}: {said}")


class Reference:
    """A template under transformers."""

    def __init__(self, source: str, form: ChatTemplate, tokenizer: Tokenizer) -> None:
        """
        Args:
            form: the form in which the template takes messages (contents as parts, arguments as text).
        """
        self.source = source
        self._form = form
        self._tokenizer = tokenizer
        self._folds = self.cannot = False
        asked, calling = Message("user", "u"), reply_to("tool", 0, MARK)
        rows = ([asked, reply_to("user", 0, MARK)], [asked, calling], [asked, calling, *answers("tool", 0)])
        self._adapts = ["", "ids", "user"]
        told = answers("tool", 0)
        with suppress(Refused):
            self.text([asked, calling, *told], TOOLS)  # a template that fills lists of its own cannot be run there
        while len(self._adapts) > 1 and not self.cannot:  # results not shown otherwise go as a user's words
            row = ADAPT[self._adapts[0]]([asked, reply_to("tool", 0, None), *told])
            if any(told[0].text in self._try(row, tools) for tools in (TOOLS, ())):
                break
            del self._adapts[0]
        if not any(MARK in self._try(row, tools) for row in rows for tools in ((), TOOLS)):
            self._folds = not self.cannot
            self._folds = self._folds and any(MARK in self._try(row, tools) for row in rows for tools in ((), TOOLS))

    def _try(self, messages: Sequence[Message], tools: Any) -> str:
        try:
            return self.text(messages, tools)
        except Refused:
            return ""

    def text(self, messages: Sequence[Message], tools: Any, prompt: bool = True) -> str:
        """A conversation as transformers writes it; thinking that the template has no field for stands in the text."""
        rows = [self._form._view(self._folded(message)) for message in messages]
        try:
            (text,), _ = chat_template_utils.render_jinja_template(
                conversations=[rows],
                tools=list(tools) or self._form._no_tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                **SPECIAL,
            )
        except Exception as error:  # templates raise whatever they like
            self.cannot |= type(error).__name__ == "SecurityError"
            raise Refused(f"{type(error).__name__}: {error}") from error
        return str(text)

    def _folded(self, message: Message) -> Message:
        if message.reasoning is None or not self._folds:
            return message
        return replace(message, content=f"<think>\n{message.reasoning}\n</think>\n\n{message.text}", reasoning=None)

    def shown(self, messages: Sequence[Message], tools: Any, new: Sequence[Message] = (), prompt: bool = True) -> str:
        """A conversation with results of tools in the first form in which the new ones are shown."""
        problem: Refused | None = None
        for adapt in self._adapts:
            try:
                text = self.text(ADAPT[adapt](messages), tools, prompt)
            except Refused as error:
                problem = problem or error
                continue
            if all(message.text in text for message in new):
                return text
        raise problem or Refused("drops what the world said last")

    def ids(self, text: str, start: int = 0) -> list[int]:
        """Ids of a text from a character on; the text is encoded as a whole."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [i for i, (first, _) in zip(found.ids, found.offsets, strict=True) if first >= start]


def answers(kind: str, number: int) -> list[Message]:
    """What the world says, each time in other words."""
    rows = []
    for place, role in enumerate(("tool", "tool") if kind == "tools" else kind.split()):
        if role == "tool":
            text = f"result {number} {place} amber"
            rows.append(Message("tool", text, tool_call_id=f"call{number:04}{place}", name="look"))
        else:
            rows.append(Message("user", f"Question {number} {place}, please."))
    return rows


def reply_to(kind: str, number: int, thought: str | None) -> Message:
    """The reply that is answered so."""
    count = sum(message.role == "tool" for message in answers(kind, number))
    calls = tuple(ToolCall("look", {"key": f"word{number}"}, f"call{number:04}{place}") for place in range(count))
    return Message("assistant", "" if calls else f"It is {number}.", tool_calls=calls, reasoning=thought)


class Player:
    """Plays conversations with one template."""

    def __init__(self, source: str, template: ChatTemplate, tally: Tally) -> None:
        tokenizer = tokenizer_of(template)
        codec = HFTokenizer(tokenizer)
        self.renderer = ChatRenderer(codec, template, stop_ids=frozenset((codec.control["<|eos|>"],)))
        self.reference = Reference(source, self.renderer.template, tokenizer)
        self.tally = tally
        self.control = re.compile("|".join(map(re.escape, sorted(codec.control, key=len, reverse=True))))
        asked = [Message("user", "Question, please.")]
        self.opens = self.reference.text(asked, [])[len(self.reference.text(asked, [], False)) :]
        self.stops = {self.renderer.decode([i]): i for i in self.renderer.stop_ids}

    def play(self, plan: Plan, history: str) -> None:
        """One conversation in one mode."""
        tools = TOOLS if any("tool" in kind for kind in PLANS[plan.plan]) else []
        messages = [Message("system", "Be brief.")] if plan.system else []
        messages.append(Message("user", "Question, please."))
        thoughts = ORDERS[plan.thinking]
        try:
            self.reference.text(messages, tools)
            ids = list(self.renderer.open(messages, tools).ids)
        except (Refused, TemplateError):
            self.tally.add("refused")
            return
        self.tally.conversations += 1
        replies: list[SampledReply] = []
        exact = True
        for number, kind in enumerate(PLANS[plan.plan]):
            new = answers(kind, number)
            wanted = reply_to(kind, number, thoughts[number % len(thoughts)])
            reply, sampled, canonical = self.reply(messages, wanted, new, tools)
            exact = exact and canonical
            if not reply.tool_calls:  # one that makes no calls is answered in words
                new = answers("user", number)
            replies.append(SampledReply(len(messages), tuple(sampled), len(ids)))
            messages.append(reply)
            ids += sampled
            outcome, found, said = self.turn(history, messages, replies, new, ids, tools, exact)
            self.tally.add(outcome, f"{history}, {plan}, turn {number} ({kind}): {said}")
            if found is None:
                return
            if isinstance(found, Branch):
                del ids[found.keep :]
            ids += found.ids
            if found.replies is not None:
                replies = [r._replace(start=start) for r, start in zip(replies, found.replies, strict=True)]
            messages += new

    def turn(
        self,
        history: str,
        messages: list[Message],
        replies: list[SampledReply],
        new: list[Message],
        ids: list[int],
        tools: Any,
        exact: bool,
    ) -> tuple[str, Extend | Branch | None, str]:
        """What came of one answer of the world: the outcome, what was answered, and what is said of it."""
        wanted: list[int] = []
        refused = problem = ""
        try:
            if history == "append":
                wanted = self.tail(messages, replies[-1].ids, new, tools)
            else:
                wanted = self.reference.ids(self.reference.shown([*messages, *new], tools, new))
        except Refused as error:
            refused = str(error)
        found: Extend | Branch | None = None
        try:
            if history == "append":
                found = self.renderer.extend(messages, replies[-1].ids, new, tools)
            else:
                found = self.renderer.compose([*messages, *new], replies, ids, tools)
        except TemplateError as error:
            problem = str(error)
        except Exception as error:
            return "crashes", None, f"{type(error).__name__}: {error}"
        if refused:
            return "refused", found, refused
        if found is None:
            return "wrong", None, f"refused here: {problem}"
        branched = isinstance(found, Branch)
        got = found.ids if history == "append" else [*ids[: found.keep if isinstance(found, Branch) else None], *found.ids]
        same = got == wanted
        decode = self.renderer.decode
        if not exact and history == "template" and not same:  # replies that the template would spell in another way
            same = "".join(decode(got).split()) == "".join(decode(wanted).split())
        if not same or (branched and history == "append"):
            at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
            place = slice(max(0, at - 12), at + 30)
            return "wrong", found, f"at {at}: {decode(got[place])!r}, not {decode(wanted[place])!r}"
        if isinstance(found, Branch):
            return ("branched" if found.reason in REASONS else "unexplained"), found, found.reason
        return "equal", found, ""

    def tail(self, messages: Sequence[Message], sampled: Sequence[int], new: Sequence[Message], tools: Any) -> list[int]:
        """What transformers writes behind the last reply, as ids."""
        reply = messages[-1]
        calls = reply.tool_calls
        marked = [replace(reply, content=reply.text + MARK)]
        if calls:
            last = replace(calls[-1], arguments={**calls[-1].arguments, "key": f"{calls[-1].arguments.get('key')}{MARK}"})
            marked = [replace(reply, tool_calls=(*calls[:-1], last)), *marked]
        for one in marked:
            text = self.reference.shown([*messages[:-1], one, *new], tools, new)
            if MARK in text:
                break
        else:
            raise Refused("does not show the reply")
        behind = text.rpartition(MARK)[2]
        before = behind.partition(new[0].text)[0]
        stop = self.renderer.decode(sampled[-1:])
        tokens = [match for match in self.control.finditer(before)]
        own = next((match for match in tokens if match.group() == stop), None)
        heads = self.renderer.contract.heads
        if own is not None:
            cut = own.end()
        elif heads:  # another header than the one that was sampled is written in full
            cut = next((match.start() for match in tokens if match.group() in self.stops), 0)
        elif found := next((match for match in tokens if match.group() in self.stops), None):
            cut = found.end()
        elif tokens:
            cut = tokens[0].end() if tokens[0].group() not in self.opens else tokens[0].start()
        else:  # closed by plain text, which stands behind a last reply too
            last = self.reference.shown([*messages[:-1], one], tools, prompt=False).rpartition(MARK)[2]
            cut = next((i for i, (a, b) in enumerate(zip(last, behind, strict=False)) if a != b), min(len(last), len(behind)))
        return self.reference.ids(text, len(text) - len(behind) + cut)

    def reply(
        self, messages: Sequence[Message], wanted: Message, new: Sequence[Message], tools: Any
    ) -> tuple[Message, list[int], bool]:
        """A reply, its ids, and whether the template itself writes it so where it comes last here.

        Its text is what the template writes for it here, or, where that is read in another way, behind a lone question.
        """
        for asked in (messages, [Message("user", "Question, please.")]):
            try:
                text, stop = self.written(asked, wanted, new, tools)
            except Refused:
                continue
            ids = [*self.reference.ids(text), stop]
            told = self.renderer.parse(ids, tools)
            if wanted.tool_calls and "look" not in text:  # a reply that ends before its calls
                return told, ids, False
            if len(told.tool_calls) != len(wanted.tool_calls) or any(call.error for call in told.tool_calls):
                told = replace(wanted, reasoning=told.reasoning)  # in a format that nothing reads
            calls = tuple(replace(call, id=own.id) for call, own in zip(told.tool_calls, wanted.tool_calls, strict=True))
            told = replace(told, tool_calls=calls)
            if told.text.strip() == wanted.text and (told.reasoning or wanted.reasoning or "") == (wanted.reasoning or ""):
                break
        else:
            text = "It is so."
            ids, told = self.renderer.encode_reply(text), Message("assistant", text)
        return told, ids, text != "It is so." and self.canonical(messages, told, tools, text)

    def written(self, asked: Sequence[Message], wanted: Message, new: Sequence[Message], tools: Any) -> tuple[str, int]:
        """The text of a reply behind a conversation as the template writes it where it comes last, and its stop."""
        prompt = self.reference.shown(asked, tools)
        shown = self.reference.shown([*asked, wanted], tools, prompt=False)
        text = shown[len(prompt) :]
        thought = self.reference.shown([*asked, replace(wanted, reasoning=MARK)], tools, prompt=False)
        if not shown.startswith(prompt) and thought.startswith(prompt) and thought.count(MARK) == 1:
            shown = thought.replace(MARK, wanted.reasoning or "")  # the prompt has opened the thinking
            text = shown[len(prompt) :]
        elif not shown.startswith(prompt):
            header, own = (text.rpartition(asked[-1].text)[2] for text in (prompt, shown))
            size = next((i for i, (a, b) in enumerate(zip(header, own, strict=False)) if a != b), min(len(header), len(own)))
            size = next((m.start() for m in self.control.finditer(header) if m.start() < size < m.end()), size)
            opened = header.rfind("<think>") > header.rfind("</think>")
            text = own[size:]
            while (match := self.control.match(text)) and match.group() in header[size:]:
                text = text[match.end() :]
            if opened:
                text = f"{wanted.reasoning or ''}\n</think>\n\n" + text.removeprefix("<think>\n")
        ends = sorted((text.find(token), token) for token in self.stops if token in text)
        if ends:
            return text[: ends[0][0]], self.stops[ends[0][1]]
        last = self._following(shown, [*asked, wanted], new, tools)
        return (text, last) if last is not None else (text.rstrip(), min(self.renderer.stop_ids))  # closed by plain text

    def canonical(self, messages: Sequence[Message], reply: Message, tools: Any, text: str) -> bool:
        """Whether the template writes a reply in this text."""
        try:
            prompt = self.reference.shown(messages, tools)
            return self.reference.shown([*messages, reply], tools, prompt=False).startswith(prompt + text)
        except Refused:
            return False

    def _following(self, shown: str, messages: Sequence[Message], new: Sequence[Message], tools: Any) -> int | None:
        """The stop of a reply that what follows it ends, its header; None where nothing does."""
        try:
            longer = self.reference.shown([*messages, *new], tools, new)
        except Refused:
            longer = ""
        match = self.control.search(longer, len(shown)) if longer.startswith(shown) else None
        return self.stops.get(match.group()) if match else None


def examine(source: str, template: ChatTemplate, only: Callable[[Plan], bool] = lambda plan: True) -> Tally:
    """All conversations with one template, in both modes."""
    tally = Tally()
    try:
        player = Player(source, template, tally)
    except TemplateError:
        tally.add("refused")
        return tally
    for plan in filter(only, plans()):
        for history in ("append", "template"):
            try:
                player.play(plan, history)
            except Exception as error:
                tally.add("crashes", f"{history}, {plan}: {type(error).__name__}: {error}")
    return tally
