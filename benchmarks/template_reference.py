"""A chat template under transformers: the texts that built prompts are compared with; see
`templates.py --turns`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kit.corpus import SPECIAL, TOOLS
from template_scenarios import QUESTION, answers, reply_to
from tokenizers import Tokenizer
from transformers.utils import chat_template_utils

from turnwright.renderers import ChatTemplate
from turnwright.renderers.template import ADAPT
from turnwright.types import Message

MARK = "80316420795318642075"
_MAX_TEXTS = 1000
"""Texts that are kept."""


class Refused(Exception):
    """transformers cannot show a conversation."""


@dataclass(frozen=True)
class Reading:
    """How a message is given to the template where more than one way is right."""

    lists: frozenset[str] = frozenset()
    """Roles for which the template gets several texts as a list; else they are one, with
    line breaks between them."""
    folds_examples: bool = False
    """Whether thinking and calls in the opening stand in the text if the template
    has no field for them."""


class Reference:
    """A template under transformers."""

    def __init__(self, source: str, form: ChatTemplate, tokenizer: Tokenizer) -> None:
        """
        Args:
            form: the form in which the template takes messages (contents as
                parts, arguments as text).
        """
        self.source = source
        self._form = form
        self._tokenizer = tokenizer
        self.folds = self.cannot = False
        self._folds_calls = True
        self._texts: dict[str, str | Refused] = {}
        self.words: tuple[str, ...] = ()
        """Words that the template may remove from a text."""
        self.reading = Reading()
        self.opening = 0
        """Number of messages that the conversation opened with."""
        self.reads_calls = True
        told = answers("tool", 0)
        asked, calling = Message("user", "u"), reply_to("tool", 0, MARK)
        rows = ([asked, reply_to("user", 0, MARK)], [asked, calling], [asked, calling, *told])
        with suppress(Refused):
            # A template that fills lists of its own cannot be run there.
            self.text([asked, calling, *told], TOOLS)

        silent = reply_to("tool", 0, None)
        (call,) = silent.tool_calls
        marked = replace(silent, tool_calls=(replace(call, arguments={"key": MARK}),))
        self.reads_calls = self.cannot or self._shows_mark(
            ([asked, marked], [asked, marked, *told])
        )

        self._adapts = ["", "ids", "user"]
        while len(self._adapts) > 1 and not self.cannot:
            # Results not shown otherwise go as a user's words.
            row = ADAPT[self._adapts[0]]([asked, silent, *told])
            if any(told[0].text in self._try(row, tools) for tools in (TOOLS, ())):
                break
            del self._adapts[0]

        if not self._shows_mark(rows) and not self.cannot:
            self.folds = True
            self.folds = self._shows_mark(rows)
        # A template may show either the text of a reply or its calls: then folded
        # thinking would hide the calls.
        spoken = replace(marked, content="<think>\nSo.\n</think>\n\n")
        self._folds_calls = (
            self._shows_mark(([asked, spoken], [asked, spoken, *told])) or not self.reads_calls
        )

    def _shows_mark(self, rows: Iterable[Sequence[Message]]) -> bool:
        for row in rows:
            for adapt in ("", "ids"):
                if any(MARK in self._try(ADAPT[adapt](row), tools) for tools in ((), TOOLS)):
                    return True
        return False

    def _try(self, messages: Sequence[Message], tools: Any) -> str:
        try:
            return self.text(messages, tools)
        except Refused:
            return ""

    def text(self, messages: Sequence[Message], tools: Any, prompt: bool = True) -> str:
        """A conversation as transformers writes it; what the template has no field
        for stands in the text."""
        return self._rendered(self._prepared(messages), tools, prompt)

    def _rendered(self, messages: Sequence[Message], tools: Any, prompt: bool) -> str:
        views = [self._form._view(message) for message in messages]
        key = json.dumps([views, tools, prompt])
        if key not in self._texts:  # both modes ask for the same texts
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.clear()
            self._texts[key] = self._try_rendering(views, tools, prompt)
        found = self._texts[key]
        if isinstance(found, Refused):
            raise found
        return found

    def _try_rendering(self, views: list[Any], tools: Any, prompt: bool) -> str | Refused:
        try:
            (text,), _ = chat_template_utils.render_jinja_template(
                conversations=[views],
                tools=list(tools) or self._form._no_tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                **SPECIAL,
            )
        except Exception as error:  # templates raise whatever they like
            self.cannot |= type(error).__name__ == "SecurityError"
            return Refused(f"{type(error).__name__}: {error}")
        return str(text)

    def _prepared(self, messages: Sequence[Message]) -> list[Message]:
        prepared = []
        for number, message in enumerate(messages):
            if number >= self.opening or self.reading.folds_examples:
                message = self._folded(message)
            prepared.append(self._joined(message))
        return prepared

    def _joined(self, message: Message) -> Message:
        """Join the texts of a content if the template takes texts."""
        if (
            isinstance(message.content, str)
            or message.role in self.reading.lists
            or self._form._parts
        ):
            return message
        return replace(message, content="\n".join(map(str, message.content)))

    def _folded(self, message: Message) -> Message:
        """Put what the template has no field for into the text: calls in Hermes'
        format, and thinking."""
        if message.tool_calls and not self.reads_calls:
            text = "\n".join(part for part in (message.text, hermes(message)) if part)
            message = replace(message, content=text, tool_calls=())
        if (
            message.reasoning is None
            or not self.folds
            or (message.tool_calls and not self._folds_calls)
        ):
            return message
        return replace(
            message,
            content=f"<think>\n{message.reasoning}\n</think>\n\n{message.text}",
            reasoning=None,
        )

    def shown(
        self,
        messages: Sequence[Message],
        tools: Any,
        new: Sequence[Message] = (),
        prompt: bool = True,
    ) -> str:
        """A conversation with results of tools in the first form in which
        the new ones are shown."""
        problem: Refused | None = None
        prepared = self._prepared(messages)
        told = any(message.role == "tool" for message in messages)
        for adapt in self._adapts if told else [""]:
            try:
                text = self._rendered(ADAPT[adapt](prepared), tools, prompt)
            except Refused as error:
                problem = problem or error
                continue
            if all(core in text for message in new for core in self.cores(message)):
                return text  # a result without a text may be left out
        raise problem or Refused("drops what the world said last")

    def cores(self, message: Message) -> list[str]:
        """The longest piece of each text of a message that the template keeps as it is."""
        texts = (
            (message.content,) if isinstance(message.content, str) else map(str, message.content)
        )
        cores = []
        for text in texts:
            for word in self.words:
                text = text.replace(word, MARK)
            cores.append(max(text.split(MARK), key=len).strip())
        return cores

    def takes_parts(self, role: str, tools: Any) -> bool:
        """Whether the template shows a content of several texts as a list of them."""
        parts = Message(role, ("alpha", "beta"), tool_call_id="call00000", name="look")
        messages = [*([QUESTION, reply_to("tool", 0, None)] if role == "tool" else []), parts]
        messages += [QUESTION] if role == "system" else []
        kept, self.reading = self.reading, Reading(lists=frozenset((role,)))
        text = self._try(messages, tools)
        self.reading = kept
        if not text:  # transformers cannot run the template
            return self._form.writes_parts(role)
        return (
            "alpha" in text and "beta" in text and "'alpha'" not in text and '"alpha"' not in text
        )

    def ids(self, text: str, start: int = 0) -> list[int]:
        """Ids of a text from a character on; the text is encoded as a whole."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return [i for i, (first, _) in zip(found.ids, found.offsets, strict=True) if first >= start]


def hermes(message: Message) -> str:
    """The calls of a reply as a model writes them whose template has no format of its own."""
    rows = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return "\n".join(
        f"<tool_call>\n{json.dumps(row, ensure_ascii=False)}\n</tool_call>" for row in rows
    )
