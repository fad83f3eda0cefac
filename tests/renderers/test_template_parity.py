"""A template writes here, to the character, what it writes under transformers; refusals
are refusals there too."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from kit.corpus import SPECIAL, TOOLS, distinct, template_of

from turnwright.errors import TemplateError
from turnwright.renderers import ChatTemplate, template_names, template_source
from turnwright.types import ImageRef, Message, ToolCall

chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")

NOW = datetime(2026, 3, 5, 6, 7, 8)
CALL = ToolCall("look", {"key": "amber", "deep": {"b": [1, None, True], "a": 0.5}}, "call00000")
TOLD = Message("tool", "birch", tool_call_id="call00000", name="look")
THOUGHT = Message("assistant", "Yes.", reasoning="I think.\nTwice.")
USER, SAID = Message("user", "What is it? <b>'&\""), Message("assistant", "Birch.")
CASES: dict[str, tuple[list[Message], list[dict[str, Any]], bool, Any]] = {
    "nothing": ([], [], True, None),
    "user": ([USER], [], True, None),
    "user, no prompt": ([USER], [], False, None),
    "system": ([Message("system", " Be brief. \n"), USER, SAID, USER], [], True, None),
    "developer": ([Message("developer", "Be brief."), USER], [], True, None),
    "padded": (
        [Message("user", " \n padded\t "), Message("assistant", "\n{}\n\n"), USER],
        [],
        True,
        None,
    ),
    "thinking": ([USER, THOUGHT, USER, THOUGHT], [], False, None),
    "thinking inside": (
        [USER, Message("assistant", "<think>\nHm.\n</think>\n\nYes."), USER],
        [],
        True,
        None,
    ),
    "no thinking": ([USER, Message("assistant", "Yes.", reasoning="")], [], False, None),
    "tools": ([USER], TOOLS, True, None),
    "tools and system": ([Message("system", "Be brief."), USER, SAID, USER], TOOLS, True, None),
    "call": ([USER, Message("assistant", "", tool_calls=(CALL,)), TOLD, SAID], TOOLS, False, None),
    "calls": (
        [USER, Message("assistant", "Hm.", tool_calls=(CALL, CALL), reasoning="So."), TOLD, TOLD],
        TOOLS,
        True,
        None,
    ),
    "call, no tools": ([USER, Message("assistant", "", tool_calls=(CALL,)), TOLD], [], True, None),
    "parts": ([Message("user", ("Look: ", ImageRef("00"), "?")), SAID, USER], [], True, None),
    "only parts": (
        [Message("user", ("One.",)), Message("assistant", ("Two.",)), Message("user", ("Three.",))],
        [],
        True,
        None,
    ),
    "documents": ([USER], [], True, [{"title": "T", "text": "Text."}]),
    "two users": ([USER, USER], [], True, None),
    "ends in a reply": ([USER, SAID], [], True, None),
}
REFUSED_THERE = {
    "SecurityError": "the immutable sandbox there lets no list grow; here a template may fill "
    "lists of its own"
}


class Clock(datetime):
    """One that stands still."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOW


def ours(template: ChatTemplate, case: Any) -> str | None:
    messages, tools, prompt, documents = case
    try:
        return template.render(messages, tools, generation_prompt=prompt, documents=documents)
    except TemplateError:
        return None


def theirs(template: ChatTemplate, case: Any) -> tuple[str | None, str]:
    """What transformers writes; texts in a list are one text where the template
    writes no lists of its own."""
    messages, tools, prompt, documents = case
    rows = [
        m.to_dict()
        if m.media or template.writes_parts(m.role)
        else {**m.to_dict(), "content": m.text}
        for m in messages
    ]
    try:
        texts, _ = chat_template_utils.render_jinja_template(
            conversations=[rows],
            tools=tools or None,
            documents=documents,
            chat_template=template.source,
            add_generation_prompt=prompt,
            **SPECIAL,
        )
    except Exception as error:
        return None, type(error).__name__
    return texts[0], ""


def test_every_template_of_the_corpus_writes_what_it_does_under_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    sources = [*distinct(), *((name, template_source(name)) for name in template_names())]
    seen: Counter[str] = Counter()
    for name, source in sources:
        template = template_of(name, source)
        template._now = NOW
        for label, case in CASES.items():
            expected, error = theirs(template, case)
            found = ours(template, case)
            seen["refused" if expected is None else "shown"] += 1
            if error in REFUSED_THERE:
                seen[error] += 1
                continue
            assert found == expected, f"{name}: {label}: {error}"
    print(f"{len(sources)} templates, {dict(seen)}")
    assert seen["shown"] > seen["refused"]
    assert seen["refused"] or not distinct()  # those of packages, fetched where there is a network
    assert seen["SecurityError"] <= seen.total() // 20
