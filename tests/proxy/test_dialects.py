"""Each dialect over a real socket: calls, results, images and streams; what comes back is
recognized by the next request."""

from __future__ import annotations

import base64
import contextlib
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.proxy import TOOL, RecordingEngine, account, called, client, contexts, direct
from kit.proxy_programs import PROGRAMS, ChatProgram, MessagesProgram, ResponsesProgram
from kit.vision import tiny_vlm_directory

import turnwright as tw
from turnwright.renderers import byte_renderer, load_renderer
from turnwright_serve.proxy import ProxyServer, ProxySession, ProxySettings
from turnwright_serve.proxy.anthropic import FIELDS as MESSAGES_FIELDS
from turnwright_serve.proxy.anthropic import AnthropicMessages
from turnwright_serve.proxy.chat import FIELDS as CHAT_FIELDS
from turnwright_serve.proxy.chat import ChatCompletions
from turnwright_serve.proxy.dialect import Dialect
from turnwright_serve.proxy.request_cache import RequestCache
from turnwright_serve.proxy.responses import FIELDS as RESPONSES_FIELDS
from turnwright_serve.proxy.responses import Responses
from turnwright_serve.proxy.wire import IGNORED, REFUSED, RequestFault, WireRequest

REPLIES = [called("look_up", key="a b"), "<think>\nwell\n</think>\n\nIt is é.", "Good bye."]
PARTS = (
    "role content type text function name arguments id call_id output image_url source data "
    "url input thinking signature"
)
KEYS = sorted(
    {
        *CHAT_FIELDS,
        *RESPONSES_FIELDS,
        *MESSAGES_FIELDS,
        *IGNORED,
        *REFUSED,
        *PARTS.split(),
        "tool_calls",
        "n",
    }
)
PNG = base64.b64encode(b"\x89PNG not decoded by a text model").decode()


DIALECTS: dict[Any, Dialect] = {
    ChatProgram: ChatCompletions(),
    ResponsesProgram: Responses(),
    MessagesProgram: AnthropicMessages(),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_program_that_only_appends_is_one_row(kind: type[ChatProgram], stream: bool) -> None:
    program, engine = kind(stream), RecordingEngine(REPLIES)

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            for turn in range(3):
                response = await http.post(program.path, json=program.body())
                assert response.status_code == 200, response.text
                calls = program.take(response.text)
                for call in calls:
                    assert json.loads(
                        call.get("arguments") or json.dumps(call.get("input"))
                        if "function" not in call
                        else call["function"]["arguments"]
                    ) == {"key": "a b"}
                    program.answer(call, "a letter pair")
                if not calls:
                    program.say(f"More {turn}?")

    trajectory = direct(work, engine)
    assert [turn.reply.tool_calls != () for turn in trajectory.turns] == [True, False, False]
    assert len(list(trajectory.samples())) == 1
    assert trajectory.branches == {}
    assert contexts(trajectory) == [ids for _, ids in engine.received]
    account(trajectory)
    assert [row["completion_tokens"] for row in program.usage] == [
        len(t.spans) and sum(len(trajectory.spans[s].ids) for s in t.spans)
        for t in trajectory.turns
    ]
    second = trajectory.turns[1].messages
    assert [(m.role, m.text, m.tool_call_id, m.name) for m in second] == [
        ("tool", "a letter pair", "call_0", "look_up")
    ]
    assert trajectory.turns[0].messages[0].text == "Be brief."


@pytest.mark.parametrize("kind", PROGRAMS)
def test_reasoning_that_a_program_drops_is_counted_and_its_ids_stay(
    kind: type[ChatProgram],
) -> None:
    program, engine = kind(False), RecordingEngine(REPLIES[1:])

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            program.take((await http.post(program.path, json=program.body())).text)
            if kind is ChatProgram:
                del program.messages[-1]["reasoning_content"]
            elif kind is ResponsesProgram:
                program.messages = [m for m in program.messages if m.get("type") != "reasoning"]
            else:
                program.messages[-1]["content"] = [
                    b for b in program.messages[-1]["content"] if b["type"] != "thinking"
                ]
            program.say("More?")
            program.take((await http.post(program.path, json=program.body())).text)

    trajectory = direct(work, engine)
    assert trajectory.metrics["proxy_reasoning_dropped"] == 1
    assert trajectory.branches == {}
    assert len(list(trajectory.samples())) == 1
    account(trajectory)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n: one reply"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"messages": "hello", "input": 5}, "must be a list"),
    (
        {
            "messages": [{"role": "wizard", "content": "x"}],
            "input": [{"role": "wizard", "content": "x"}],
        },
        "wizard",
    ),
    ({"max_tokens": 0, "max_output_tokens": 0}, "at least 1"),
    ({"tools": [{"type": "function", "function": {}, "input_schema": {}}]}, "needs a name"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_bad_request_is_refused_in_the_shape_of_its_dialect(
    kind: type[ChatProgram], changed: dict[str, Any], message: str
) -> None:
    program = kind(False)

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            response = await http.post(program.path, json=program.body() | changed)
            assert response.status_code == 400
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
            assert message in error["message"]
            assert error["type"] == "invalid_request_error"
            assert (response.json().get("type") == "error") == (kind is MessagesProgram)
            assert (
                await http.post(
                    program.path, content=b"{", headers={"content-type": "application/json"}
                )
            ).status_code == 400
            program.take((await http.post(program.path, json=program.body())).text)

    trajectory = direct(work, RecordingEngine(REPLIES))
    assert trajectory.metrics["proxy_refused_requests"] == 2
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("kind", PROGRAMS)
def test_media_of_unknown_kinds_and_foreign_urls_are_refused(kind: type[ChatProgram]) -> None:
    program = kind(False)

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            program.show(PNG)
            response = await http.post(program.path, json=program.body())
            assert response.status_code == 400
            assert "image" in response.json()["error"]["message"]
            for url in (
                "https://example.org/a.png",
                "/etc/passwd",
                "file:///etc/passwd",
                "data:text/html;base64,aaaa",
                None,
            ):
                with pytest.raises(RequestFault):
                    session.cache.of_url(url)
            program.messages.pop()
            program.take((await http.post(program.path, json=program.body())).text)

    trajectory = direct(work, RecordingEngine(REPLIES))
    assert trajectory.metrics["proxy_refused_requests"] == 1
    assert trajectory.branches == {}  # a refused request is no conversation


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_unknown_session_and_an_unknown_model_are_named(kind: type[ChatProgram]) -> None:
    program = kind(False)

    async def work(session: ProxySession, root: str) -> None:
        async with client(root.replace(session.token, "0" * 32)) as http:
            response = await http.post(program.path, json=program.body())
            assert response.status_code == (403 if kind is MessagesProgram else 400)
            assert "no such session" in response.json()["error"]["message"]
        async with client(root) as http:
            response = await http.post(program.path, json=program.body() | {"model": "gpt"})
            assert response.status_code == 404
            assert "models are m" in response.json()["error"]["message"]
            program.take((await http.post(program.path, json=program.body())).text)
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "m"
        async with client(root.partition("/s/")[0]) as http:  # the token as API key
            for headers in (
                {"x-api-key": session.token},
                {"authorization": f"Bearer {session.token}"},
            ):
                assert (await http.get("/v1/models", headers=headers)).status_code == 200

    direct(work, RecordingEngine(REPLIES), settings=ProxySettings(models=("m",)))


def test_tokens_are_counted_by_the_renderer() -> None:
    async def work(session: ProxySession, root: str) -> None:
        program = MessagesProgram(False)
        async with client(root) as http:
            counted = (await http.post("/v1/messages/count_tokens", json=program.body())).json()[
                "input_tokens"
            ]
            (call,) = program.take((await http.post(program.path, json=program.body())).text)
            assert counted == session.model.trajectory.turns[0].context
            program.answer(call, "a letter pair")
            counted = (await http.post("/v1/messages/count_tokens", json=program.body())).json()[
                "input_tokens"
            ]
            program.take((await http.post(program.path, json=program.body())).text)
            assert counted == session.model.trajectory.turns[1].context

    assert direct(work, RecordingEngine(REPLIES)).branches == {}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from(["", "user", "assistant", "tool", "text", "function"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=24,
)


def read(dialect: Dialect, body: dict[str, Any]) -> WireRequest:
    cache = RequestCache()
    return dialect.read(cache.parse(json.dumps(body).encode(), dialect.rows), cache)


@pytest.mark.parametrize("value", [True, 1, "x", [1], {"a": 1}], ids=repr)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_field_may_have_any_type(kind: type[ChatProgram], value: Any) -> None:
    for name in KEYS:
        with contextlib.suppress(RequestFault):
            assert isinstance(read(DIALECTS[kind], kind(False).body() | {name: value}), WireRequest)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PROGRAMS), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=2)
)
def test_a_body_of_any_shape_is_read_or_refused(
    kind: type[ChatProgram], changed: dict[str, Any]
) -> None:
    with contextlib.suppress(RequestFault):
        assert isinstance(read(DIALECTS[kind], kind(False).body() | changed), WireRequest)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_images_are_stored_once_and_placed_in_the_context(
    kind: type[ChatProgram], tmp_path: Path
) -> None:
    renderer = load_renderer(tiny_vlm_directory(tmp_path / "vlm", "qwen3_vl", weights=False))
    program, picture = kind(False), BytesIO()
    PIL.Image.new("RGB", (64, 64), (200, 10, 10)).save(picture, "PNG")

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            for _ in range(3):
                program.show(base64.b64encode(picture.getvalue()).decode())
                response = await http.post(program.path, json=program.body())
                assert response.status_code == 200, response.text
                program.take(response.text)

    trajectory = direct(work, RecordingEngine(["One.", "Two.", "Three."]), renderer=renderer)
    assert trajectory.branches == {}
    (row,) = trajectory.samples()
    assert len(row.media) == 3
    assert len({block.media for block in row.media}) == 1
    account(trajectory)


def test_unreadable_arguments_are_sent_as_written_and_recognized() -> None:
    broken = '<tool_call>\n{"name": "look_up", "arguments": "{a"}\n</tool_call>'
    for kind in PROGRAMS:
        program, engine = (
            kind(True),
            RecordingEngine([broken, "<tool_call>\n{oops\n</tool_call>", "So."]),
        )

        async def work(session: ProxySession, root: str, program: ChatProgram = program) -> None:
            async with client(root) as http:
                (call,) = program.take((await http.post(program.path, json=program.body())).text)
                program.answer(call, "Error: not JSON")
                assert program.take((await http.post(program.path, json=program.body())).text) == []
                program.say("Again.")
                program.take((await http.post(program.path, json=program.body())).text)

        trajectory = direct(work, engine)
        assert trajectory.branches == {}
        assert len(list(trajectory.samples())) == 1
        sent = json.dumps(program.messages, ensure_ascii=False)
        assert "{a" in sent
        assert "{oops" in sent


def test_a_call_that_is_required_and_missing_is_counted_and_none_offers_no_tools() -> None:
    async def work(session: ProxySession, root: str) -> None:
        program = ChatProgram(False)
        async with client(root) as http:
            program.take(
                (
                    await http.post(program.path, json=program.body() | {"tool_choice": "required"})
                ).text
            )
            program.say("And?")
            assert (
                program.take(
                    (
                        await http.post(program.path, json=program.body() | {"tool_choice": "none"})
                    ).text
                )
                == []
            )

    trajectory = direct(work, RecordingEngine(["Plain.", called("look_up", key="a")]))
    assert trajectory.metrics["proxy_tool_choice_unmet"] == 1
    assert trajectory.branches == {"tools_changed": 1}


def test_tools_of_a_namespace_are_offered_and_called_by_both_names() -> None:
    class Grouped(ResponsesProgram):
        def body(self) -> dict[str, Any]:
            group = {
                "type": "namespace",
                "name": "words",
                "tools": [{"type": "function", **TOOL}, {"type": "custom"}],
            }
            return super().body() | {"tools": [group]}

    for stream in (False, True):
        program, engine = (
            Grouped(stream),
            RecordingEngine([called("words.look_up", key="a b"), "So."]),
        )

        async def work(session: ProxySession, root: str, program: ChatProgram = program) -> None:
            async with client(root) as http:
                (call,) = program.take((await http.post(program.path, json=program.body())).text)
                assert (call["namespace"], call["name"]) == ("words", "look_up")
                program.answer(call, "a letter pair")
                program.take((await http.post(program.path, json=program.body())).text)

        trajectory = direct(work, engine)
        assert trajectory.branches == {}
        assert len(list(trajectory.samples())) == 1
        assert "words.look_up" in byte_renderer().decode(engine.received[0][1])
        assert trajectory.metrics["proxy_tools_left_out"] == 2


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_stop_text_is_sampled_and_not_sent_and_may_come_back(kind: type[ChatProgram]) -> None:
    """Chat completions and Messages stop at texts; a program that puts the text
    back changed nothing."""
    if kind is ResponsesProgram:
        return
    program, engine = kind(False), RecordingEngine(["One. END", "Two. END", "Three."])
    stop = {"stop_sequences" if kind is MessagesProgram else "stop": ["END"]}

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            for number in range(3):
                response = await http.post(program.path, json=program.body() | stop)
                program.take(response.text)
                assert "END" not in json.dumps(program.messages[-1])
                if kind is MessagesProgram:
                    found = response.json()
                    assert (found["stop_reason"], found["stop_sequence"]) == (
                        ("stop_sequence", "END") if number < 2 else ("end_turn", None)
                    )
                if number == 0:
                    text = {"type": "text", "text": "One. END"}
                    program.messages[-1]["content"] = (
                        [text] if kind is MessagesProgram else "One. END"
                    )
                program.say("More?")

    trajectory = direct(work, engine)
    assert trajectory.branches == {}
    assert len(list(trajectory.samples())) == 1
    assert trajectory.metrics["proxy_stop_text_added"] == 2  # in two requests
    account(trajectory)


def _media(kind: type[ChatProgram]) -> list[dict[str, Any]]:
    """Return content that no model here reads, in a dialect."""
    data = {"type": "base64", "media_type": "application/pdf", "data": PNG}
    if kind is MessagesProgram:
        return [
            {"type": "document", "source": data},
            {"type": "search_result", "content": []},
            {"type": "image"},
        ]
    if kind is ResponsesProgram:
        return [{"type": "input_file", "file_data": PNG}, {"type": "input_audio", "data": PNG}]
    return [
        {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
        {"type": "file", "file": {"file_data": PNG}},
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
    ]


def _error_of(response: Any, kind: type[ChatProgram]) -> dict[str, Any]:
    """Return the error of a response, which has the dialect's own shape."""
    body = response.json()
    assert response.headers["x-should-retry"] == "false"
    if kind is MessagesProgram:
        assert body.keys() == {"type", "error"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_kind_of_bad_input_has_the_shape_of_its_dialect_and_a_count(
    kind: type[ChatProgram], stream: bool
) -> None:
    program, servers = kind(stream), []
    refused = 0

    async def work(session: ProxySession, root: str) -> None:
        nonlocal refused

        async def error(**changed: Any) -> tuple[int, dict[str, Any]]:
            response = await http.post(program.path, json=program.body() | changed)
            return response.status_code, _error_of(response, kind)

        async with client(root) as http:
            status, found = await error(model="gpt-9")
            assert (status, found.get("code"), found["type"]) == (
                (404, None, "not_found_error")
                if kind is MessagesProgram
                else (404, "model_not_found", "invalid_request_error")
            )
            refused += 1
            for name, value in {
                "logit_bias": {"5": 1},
                "frequency_penalty": 0.5,
                "top_logprobs": 5,
                "guided_regex": "a*",
            }.items():
                status, found = await error(**{name: value})
                assert (status, found["type"]) == (400, "invalid_request_error")
                assert name in found["message"]
                refused += 1
            for part in _media(kind):
                before = list(program.messages)
                program.messages.append({"role": "user", "content": [part]})
                status, found = await error()
                assert (status, found["type"]) == (400, "invalid_request_error")
                program.messages = before
                refused += 1
            program.take((await http.post(program.path, json=program.body())).text)
            program.messages.append(
                {"role": "user", "content": [{"type": "text", "text": "word " * 2000}]}
            )
            if kind is ResponsesProgram:
                program.messages[-1]["content"] = "word " * 2000
            (
                status,
                found,
            ) = await error()  # over the context: a limit, which ends the episode and its program
            assert (status, found["type"]) == (
                (403, "permission_error")
                if kind is MessagesProgram
                else (400, "invalid_request_error")
            )
            assert "the episode is over" in found["message"]
            assert "too long" not in found["message"]  # what makes programs compact and go on
        async with ProxyServer() as server, client(f"{server.url}/s/{'0' * 32}") as http:
            status, found = await error()
            assert (status, "no such session" in found["message"]) == (
                403 if kind is MessagesProgram else 400,
                True,
            )
            servers.append(server.unknown_sessions)
        if session.limit is not None:
            raise session.limit

    settings = ProxySettings(models=("m",))
    limits = tw.Limits(context=4000, turn_tokens=100)
    trajectory = direct(work, RecordingEngine(REPLIES), settings=settings, limits=limits)
    assert (trajectory.stop, len(trajectory.turns)) == ("context", 1)
    assert trajectory.metrics["proxy_refused_requests"] == refused
    assert trajectory.metrics["proxy_requests_after_end"] == 1
    assert servers == [1]
    account(trajectory)


def test_a_message_with_marks_of_two_replies_is_neither() -> None:
    """The reasoning of one reply beside the text of another that says the
    same: nothing is guessed."""
    program, engine = (
        ResponsesProgram(False),
        RecordingEngine(["<think>\nwell\n</think>\n\nYes."] * 3),
    )

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            for _ in range(2):
                program.take((await http.post(program.path, json=program.body())).text)
                program.say("Sure?")
            first, second = (
                at for at, item in enumerate(program.messages) if item.get("type") == "reasoning"
            )
            program.messages[first] = program.messages[second]
            program.take((await http.post(program.path, json=program.body())).text)

    trajectory = direct(work, engine)
    assert trajectory.branches == {"rewritten_reply": 1}
    account(trajectory)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_changed_reasoning_is_a_rewritten_reply(kind: type[ChatProgram]) -> None:
    program, engine = kind(False), RecordingEngine(REPLIES[1:])

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            program.take((await http.post(program.path, json=program.body())).text)
            program.messages = json.loads(
                json.dumps(program.messages).replace("well", "never thought")
            )
            program.say("More?")
            program.take((await http.post(program.path, json=program.body())).text)

    trajectory = direct(work, engine)
    assert trajectory.branches == {"rewritten_reply": 1}
    account(trajectory)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_request_may_shorten_its_reply(kind: type[ChatProgram]) -> None:
    program, found = kind(False), []
    name = "max_output_tokens" if kind is ResponsesProgram else "max_tokens"

    async def work(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            found.append((await http.post(program.path, json=program.body() | {name: 4})).json())

    trajectory = direct(
        work, RecordingEngine(["A long reply."]), limits=tw.Limits(on_turn_length="continue")
    )
    assert [
        len(trajectory.spans[span].ids) for turn in trajectory.turns for span in turn.spans
    ] == [4]
    text = json.dumps(found[0])
    assert {
        ChatProgram: '"finish_reason": "length"',
        MessagesProgram: '"stop_reason": "max_tokens"',
    }.get(kind, '"status": "incomplete"') in text
