"""What a request repeats is read and matched once, and never taken for something else."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from test_matching import Conversation, run, user

import turnwise as tw
from tests.proxy_kit import TOOL
from turnwise.proxy import ProxySession
from turnwise.proxy.anthropic import AnthropicMessages
from turnwise.proxy.chat import ChatCompletions
from turnwise.proxy.responses import Responses
from turnwise.proxy.wire import KEPT_CONVERSATIONS, Dialect, ImageCache, WireMessage

LEAVES = st.sampled_from([True, 1, 1.0, False, 0, None, "1", ""])
ROWS = st.lists(
    st.builds(
        lambda role, text, value: {"role": role, "content": text} | ({"value": value} if role == "assistant" else {}),
        st.sampled_from(["user", "assistant"]),
        st.sampled_from(["a", "b"]),
        st.dictionaries(st.sampled_from("xy"), LEAVES, max_size=2),
    ),
    max_size=6,
)


def as_read(row: Any) -> list[WireMessage]:
    """Read a row so that the messages say all of it; every third has two."""
    text = json.dumps(row)
    return [WireMessage(row["role"], text)] * (1 + (len(text) % 3 == 0))


@given(st.lists(ROWS, min_size=1, max_size=12))
@example([[{"role": "assistant", "content": "a", "value": {"x": value}}] for value in (True, 1, 1.0, True)])
def test_rows_are_read_as_without_a_cache(requests: list[list[Any]]) -> None:
    cache = ImageCache()
    for rows in requests:
        found = cache.read_rows(rows, as_read)
        assert found == [message for row in rows for message in as_read(row)]


def test_what_repeats_is_the_same_object_and_what_follows_a_change_is_not() -> None:
    cache, count = ImageCache(), []

    def read(row: Any) -> list[WireMessage]:
        count.append(row)
        return as_read(row)

    rows = [user(str(number)) for number in range(50)]
    first = cache.read_rows(rows[:40], read)
    second = cache.read_rows(copy.deepcopy(rows), read)
    assert len(count) == 50
    assert all(a is b for a, b in zip(first, second, strict=False))
    changed = cache.read_rows([*rows[:10], user("other"), *rows[11:]], read)
    assert len(count) == 90
    own = {id(message) for message in second}
    at = next(number for number, message in enumerate(changed) if id(message) not in own)
    assert json.loads(changed[at].text) == user("other")
    assert not any(id(message) in own for message in changed[at:])
    for number in range(2 * KEPT_CONVERSATIONS):
        cache.read_rows([user(f"conversation {number}")], read)
    assert len(cache._conversations) == KEPT_CONVERSATIONS


def test_each_dialect_reads_a_longer_request_as_a_new_session_does() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
    calls["tool_calls"][0]["function"] = {"name": TOOL["name"], "arguments": '{"key": "a"}'}  # type: ignore[index]
    chat = [user("a"), calls, {"role": "tool", "tool_call_id": "c", "content": "x"}, {"role": "assistant", "content": "y"}]
    use = {"type": "tool_use", "id": "c", "name": "look_up", "input": {"key": True}}
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}, {"type": "text", "text": "z"}],
    }
    anthropic = [user("a"), {"role": "assistant", "content": [use]}, result, {"role": "assistant", "content": "y"}]
    reasoning = {"type": "reasoning", "id": "rs_1", "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"}
    items = [
        user("a"),
        reasoning,
        call,
        call | {"call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]})
    for dialect, name, rows, more in (
        (ChatCompletions(), "messages", chat, {}),
        (AnthropicMessages(), "messages", anthropic, {"system": "Rules."}),
        (Responses(), "input", items, {"instructions": "Rules."}),
    ):
        check_growth(dialect, name, rows, more)


def check_growth(dialect: Dialect, name: str, rows: list[Any], more: dict[str, Any]) -> None:
    kept = ImageCache()
    for size in range(1, len(rows) + 1):
        body = {"model": "m", name: rows[:size]} | more
        assert dialect.read(copy.deepcopy(body), kept).messages == dialect.read(body, ImageCache()).messages
    body = {"model": "m", name: rows} | {key: "Other rules." for key in more}
    assert dialect.read(body, kept).messages == dialect.read(body, ImageCache()).messages


def test_a_choice_by_text_is_made_again_when_another_reply_has_the_text() -> None:
    left = iter([b"ab", b"c", b"ab ", b"d"])

    async def work(talk: Conversation, http: Any, session: ProxySession) -> None:
        await talk.ask()
        await talk.ask(user("More."))
        await Conversation(http).ask()  # the first request once more, with other ids for the text
        await talk.ask(user("And more."))

    def script(messages: Any, rng: Any) -> list[int]:
        return list(next(left))

    trajectory = run(work, script, limits=tw.Limits(on_turn_length="continue", turn_tokens=3))[0]
    assert trajectory.branches == {"sampled_again": 1, "rewritten_reply": 1}
