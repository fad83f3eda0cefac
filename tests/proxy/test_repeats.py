"""What a request repeats is read and matched once, and never taken for something else."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.proxy import TOOL
from kit.proxy_conversations import Conversation, run, user

import turnwright as tw
from turnwright_serve.proxy import ProxySession
from turnwright_serve.proxy.anthropic import AnthropicMessages
from turnwright_serve.proxy.chat import ChatCompletions
from turnwright_serve.proxy.dialect import Dialect
from turnwright_serve.proxy.request_cache import KEPT_CONVERSATIONS, RequestCache
from turnwright_serve.proxy.responses import Responses
from turnwright_serve.proxy.wire import RequestFault, WireMessage, WireRequest

LEAVES = st.sampled_from(
    [True, 1, 1.0, False, 0, None, "1", "", 'a"]}', "\\", "é", ["messages", {}], {"messages": []}]
)
ROWS = st.lists(
    st.builds(
        lambda role, text, value: (
            {"role": role, "content": text} | ({"value": value} if role == "assistant" else {})
        ),
        st.sampled_from(["user", "assistant"]),
        st.sampled_from(["a", "b", '"messages": [']),
        st.dictionaries(st.sampled_from(["x", "messages"]), LEAVES, max_size=2),
    ),
    max_size=6,
)
FORMS = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])
OTHERS = st.dictionaries(st.sampled_from(["model", "input", "stop"]), LEAVES, max_size=2)
EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 3),
        st.sampled_from([b"", *(bytes([one]) for one in b'"\\[]{},: 1\xff')]),
    ),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Bodies that repeat rows of one another, some with bytes that were exchanged."""
    made, rows, form = [], draw(ROWS), draw(FORMS)
    for _ in range(draw(st.integers(1, 6))):
        rows = (
            rows[: draw(st.integers(0, len(rows)))] + draw(ROWS)
            if draw(st.booleans())
            else rows + draw(ROWS)
        )
        body = json.dumps(draw(OTHERS) | {"messages": rows} | draw(OTHERS), **form).encode()
        for place, gone, new in draw(EDITS) if draw(st.booleans()) else []:
            at = int(place * len(body))
            body = body[:at] + new + body[at + gone :]
        made.append(body)
        if draw(st.booleans()):
            made.append(draw(st.sampled_from(made)))
    return made


def as_read(row: Any) -> list[WireMessage]:
    """Read a row so that the messages say all of it; every third has two."""
    text = json.dumps(row)
    return [WireMessage("user", text)] * (1 + (len(text) % 3 == 0))


def read_all(rows: list[Any]) -> list[WireMessage]:
    return [message for row in rows for message in as_read(row)]


def of_assistant(row: Any) -> bool:
    return row.get("role") == "assistant"


def read_joined(rows: list[Any]) -> list[WireMessage]:
    """Read rows so that those of the assistant together say which they are."""
    return (
        [WireMessage("user", json.dumps(rows))] if all(map(of_assistant, rows)) else read_all(rows)
    )


def expected(raw: bytes) -> tuple[Any, Any, Any]:
    """Return what a body says, parsed as one: its other fields, and its messages in both ways."""
    fields = orjson.loads(raw)
    rows = fields.pop("messages")
    assert all(isinstance(row, dict) for row in rows)
    runs = [(joined, list(run)) for joined, run in groupby(rows, of_assistant)]
    return (
        fields,
        read_all(rows),
        [one for joined, run in runs for one in (read_joined(run) if joined else read_all(run))],
    )


@settings(max_examples=250)
@given(bodies(), st.lists(st.sampled_from([None, {"role": "system"}]), min_size=12, max_size=12))
@example(
    [json.dumps({"messages": [{"value": value}]}).encode() for value in (True, 1, 1.0, True)],
    [None] * 12,
)
@example(
    [
        b'{"messages": [{}]}',
        b'{"messages": [{},]}',
        b'{"messages": [{} {}]}',
        b'{"messages": [{}}]}',
    ],
    [None] * 12,
)
@example(
    [
        b'{"messages": [{}]}',
        b'{"messages": [{}x{"a": 1}]}',
        b'{"messages": [{}}}',
        b'[{"messages": [{}]}]',
    ],
    [None] * 12,
)
@example(
    [
        b'{"a": {"messages": [{}]}, "messages": [{"b": 1}]}',
        b'{"messages": [{}], "messages": [{"b": 1}]}',
    ],
    [None] * 12,
)
def test_a_body_is_read_as_one_that_is_parsed_as_one(
    raws: list[bytes], openings: list[Any]
) -> None:
    caches = RequestCache(), RequestCache()
    keys: dict[Any, bytes] = {}
    for raw, opening in zip(raws, openings, strict=False):
        try:
            fields, plain, joined = expected(raw)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            with pytest.raises(RequestFault):
                caches[0].messages(caches[0].parse(raw, "messages"), read_all, opening=opening)
            continue
        ahead = [] if opening is None else as_read(opening)
        for cache, read, joins, messages in (
            (caches[0], read_all, lambda row: False, plain),
            (caches[1], read_joined, of_assistant, joined),
        ):
            body = cache.parse(raw, "messages")
            assert {
                name: value for name, value in body.fields.items() if name != "messages"
            } == fields
            assert repr(cache.messages(body, read, opening=opening, joins=joins)) == repr(
                ahead + messages
            )
            assert keys.setdefault((read, body.key), raw) == raw
            assert cache.parse(raw, "messages").key == body.key


def raw_of(rows: list[Any]) -> bytes:
    return json.dumps({"model": "m", "messages": rows}).encode()


def test_what_repeats_is_the_same_object_and_what_follows_a_change_is_not() -> None:
    cache, count = RequestCache(), []

    def read(rows: list[Any]) -> list[WireMessage]:
        count.extend(rows)
        return read_all(rows)

    def found(rows: list[Any]) -> list[WireMessage]:
        return cache.messages(cache.parse(raw_of(rows), "messages"), read)

    rows = [user(str(number)) for number in range(50)]
    first, second = found(rows[:40]), found(rows)
    assert len(count) == 50
    assert all(a is b for a, b in zip(first, second, strict=False))
    changed = found([*rows[:10], user("other"), *rows[11:]])
    assert len(count) == 90
    own = {id(message) for message in second}
    at = next(number for number, message in enumerate(changed) if id(message) not in own)
    assert json.loads(changed[at].text) == user("other")
    assert not any(id(message) in own for message in changed[at:])
    marked = found([*rows[:49], user("marked"), user("new")])
    assert len(count) == 92
    assert all(a is b for a, b in zip(marked[:-2], second, strict=False))
    for number in range(2 * KEPT_CONVERSATIONS):
        found([user(f"conversation {number}")])
    assert len(cache._conversations) == KEPT_CONVERSATIONS


@pytest.mark.parametrize("row", ["1", "[1]", '"a"', "null"])
def test_a_row_that_is_no_object_is_named_by_its_number(row: str) -> None:
    cache = RequestCache()
    cache.messages(cache.parse(b'{"messages": [{"a": 1}, {"b": 2}]}', "messages"), read_all)
    body = cache.parse(
        f'{{"messages": [{{"a": 1}}, {{"b": 2}}, {row}, {{}}]}}'.encode(), "messages"
    )
    with pytest.raises(RequestFault, match=r"messages\[2\] must be an object"):
        cache.messages(body, read_all)


def test_strings_that_never_end_and_deep_lists_take_time_in_proportion() -> None:
    for rows in (
        b'{"a":"' * 200_000,
        b'{"a": "' + b"\\" * 1_000_001,
        b'{"a": "' + b'\\"' * 10**6,
        b"[" * 10**6,
    ):
        with pytest.raises(RequestFault, match="not JSON"):
            RequestCache().parse(b'{"messages": [' + rows, "messages")


def test_each_dialect_reads_a_longer_request_as_a_new_session_does() -> None:
    calls = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {}}],
    }
    calls["tool_calls"][0]["function"] = {"name": TOOL["name"], "arguments": '{"key": "a"}'}  # type: ignore[index]
    chat = [
        user("a"),
        calls,
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        {"role": "assistant", "content": "y"},
    ]
    use = {"type": "tool_use", "id": "c", "name": "look_up", "input": {"key": True}}
    result = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": "x"},
            {"type": "text", "text": "z"},
        ],
    }
    anthropic = [
        user("a"),
        {"role": "assistant", "content": [use]},
        result,
        {"role": "assistant", "content": "y"},
    ]
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    call = {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": "{}"}
    items = [
        user("a"),
        reasoning,
        call,
        call | {"call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    items.append(
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]}
    )
    for dialect, name, rows, more in (
        (ChatCompletions(), "messages", chat, {}),
        (AnthropicMessages(), "messages", anthropic, {"system": "Rules."}),
        (Responses(), "input", items, {"instructions": "Rules."}),
    ):
        check_growth(dialect, name, rows, more)


def check_growth(dialect: Dialect, name: str, rows: list[Any], more: dict[str, Any]) -> None:
    kept = RequestCache()
    for size in range(1, len(rows) + 1):
        body = {"model": "m", name: rows[:size]} | more
        assert read(dialect, body, kept).messages == read(dialect, body, RequestCache()).messages
    body = {"model": "m", name: rows} | {key: "Other rules." for key in more}
    assert read(dialect, body, kept).messages == read(dialect, body, RequestCache()).messages


def read(dialect: Dialect, body: dict[str, Any], cache: RequestCache) -> WireRequest:
    return dialect.read(cache.parse(json.dumps(body).encode(), dialect.rows), cache)


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
