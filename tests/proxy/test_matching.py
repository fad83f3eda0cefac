"""Which requests continue what was sampled, and the reason of every one that does not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.proxy import (
    TOOL,
    RecordingEngine,
    account,
    called,
    client,
    contexts,
    direct,
    in_order,
)
from kit.proxy_conversations import TOOLS, Conversation, run, user

import turnwright as tw
from turnwright.renderers import byte_renderer
from turnwright_serve.proxy import ProxyServer, ProxySession, ProxySettings
from turnwright_serve.proxy.matching import Exchange
from turnwright_serve.proxy.wire import WireRequest

LONG = "A summary of everything that happened so far."


def rows(trajectory: tw.Trajectory) -> int:
    return len(list(trajectory.samples()))


async def two(talk: Conversation) -> None:
    await talk.ask()
    await talk.ask(user("More."))


async def rewritten(talk: Conversation, http: Any, session: ProxySession) -> None:
    await talk.ask()
    talk.messages[-1] = {"role": "assistant", "content": "Something else."}
    await talk.ask(user("More."))


async def unknown(talk: Conversation, http: Any, session: ProxySession) -> None:
    await talk.ask()
    other = Conversation(http)
    other.messages = [user("Hi."), {"role": "assistant", "content": "Never sampled."}, user("And?")]
    await other.ask()
    other.messages[1:3] = [{"role": "assistant", "content": "Nor this."}]
    await other.ask(user("So?"))


async def dropped(talk: Conversation, http: Any, session: ProxySession) -> None:
    await two(talk)
    del talk.messages[2:4]
    await talk.ask(user("Last."))


async def edited(talk: Conversation, http: Any, session: ProxySession) -> None:
    await two(talk)
    talk.messages[3] = user("Other words.")
    await talk.ask(user("Last."))


async def forked(talk: Conversation, http: Any, session: ProxySession) -> None:
    await two(talk)
    del talk.messages[3:]
    await talk.ask(user("Other words."))


async def tools_changed(talk: Conversation, http: Any, session: ProxySession) -> None:
    await talk.ask()
    talk.tools = []
    await talk.ask(user("Sum up."))


async def again(talk: Conversation, http: Any, session: ProxySession) -> None:
    await talk.ask()
    talk.messages.pop()
    await talk.ask()


async def newest_dropped(talk: Conversation, http: Any, session: ProxySession) -> None:
    await two(talk)
    talk.messages.pop()
    await talk.ask(user("Instead, sum up."))


async def side(talk: Conversation, http: Any, session: ProxySession) -> None:
    await talk.ask()
    other = Conversation(http, tools=[])
    other.messages = [user("Name this conversation.")]
    await other.ask()


async def subagent(talk: Conversation, http: Any, session: ProxySession) -> None:
    await talk.ask()
    other = Conversation(http, headers={"x-claude-code-agent-id": "a1"})
    other.messages = [user("Look around.")]
    await other.ask()
    await other.ask(user("Go on."))
    await talk.ask(user("More."))


async def subagents_alike(talk: Conversation, http: Any, session: ProxySession) -> None:
    """Two agents with equal requests at once: neither gets the other's reply."""
    await talk.ask()
    others = [Conversation(http, headers={"x-claude-code-agent-id": name}) for name in ("a1", "a2")]
    await asyncio.gather(*(other.ask() for other in others))
    assert others[0].replies[0][0] != others[1].replies[0][0]


async def compacted(talk: Conversation, http: Any, session: ProxySession) -> None:
    await two(talk)
    other = Conversation(http)
    other.messages = [user(f"Go on from this summary:\n{LONG}")]
    await other.ask()


async def compacted_by_lines(talk: Conversation, http: Any, session: ProxySession) -> None:
    """The last exchange stays, the beginning is a summary, of which the
    program took the tags off."""
    message = await talk.ask()
    call = message["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "x"}
    await talk.ask(result, user("Sum up."))
    system = talk.messages[0]
    talk.messages = [system, user(f"What was:\n{LONG}"), message, result, user("Go on.")]
    await talk.ask()
    await talk.ask(user("And on."))


async def compacted_to_a_reply(talk: Conversation, http: Any, session: ProxySession) -> None:
    """A side call sums up, and its reply stands as a reply in a new conversation."""
    await two(talk)
    other = Conversation(http, tools=[])
    other.messages = [user("Sum this up: ...")]
    reply = await other.ask()
    talk.messages = [talk.messages[0], user("What did we do?"), reply, user("Go on.")]
    await talk.ask()


async def quoted(talk: Conversation, http: Any, session: ProxySession) -> None:
    """A reply that repeats its own prompt makes no compacted conversation of
    another with that text."""
    talk.messages[1] = user(LONG)
    await talk.ask()
    other = Conversation(http, tools=[{"type": "function", "function": TOOL | {"name": "other"}}])
    other.messages = [user(f"Also: {LONG}")]
    await other.ask()


CASES = [
    (rewritten, ["One.", "Two."], {"rewritten_reply": 1}, 2),
    (unknown, ["One.", "Two.", "Three."], {"unknown_reply": 2}, 3),
    (dropped, ["One.", "Two.", "Three."], {"dropped_reply": 1}, 2),
    (edited, ["One.", "Two.", "Three."], {"edited": 1}, 2),
    (forked, ["One.", "Two.", "Three."], {"edited": 1}, 2),
    (tools_changed, ["One.", "Two."], {"tools_changed": 1}, 2),
    (again, ["One.", "Two."], {"sampled_again": 1}, 2),
    (newest_dropped, ["One.", "Two.", "Three."], {"dropped_reply": 1}, 2),
    (side, ["One.", "A name."], {"side": 1}, 2),
    (subagent, ["One.", "Two.", "Three.", "Four."], {"subagent": 1}, 2),
    (subagents_alike, ["One.", "Two.", "Three."], {"subagent": 2}, 3),
    (compacted, ["One.", LONG, "Three."], {"compacted": 1}, 2),
    (
        compacted_by_lines,
        [
            called("look_up", key="a"),
            f"<analysis>\nHm.\n</analysis>\n<summary>\n{LONG}\n</summary>",
            "Three.",
            "Four.",
        ],
        {"compacted": 1},
        2,
    ),
    (compacted_to_a_reply, ["One.", "Two.", LONG, "Four."], {"side": 1, "compacted": 1}, 3),
    (quoted, [LONG, "Two."], {"subagent": 1}, 2),
]


@pytest.mark.parametrize(
    ("work", "replies", "branches", "count"),
    CASES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_branch_has_its_reason(
    work: Any, replies: list[str], branches: dict[str, int], count: int
) -> None:
    trajectory, _ = run(work, replies)
    assert trajectory.branches == branches
    assert rows(trajectory) == count
    named = [
        turn.info["proxy"].get("branch")
        for turn in trajectory.turns
        if "proxy" in turn.info and "branch" in turn.info["proxy"]
    ]
    assert sorted(named) == sorted(name for name, number in branches.items() for _ in range(number))
    if work is compacted:
        assert trajectory.metrics["proxy_summaries"] == 1
        assert trajectory.turns[1].info == {"proxy": {"summary": True}}
    if work in (compacted_by_lines, compacted_to_a_reply):
        (summary,) = [
            turn for turn in trajectory.turns if turn.info.get("proxy", {}).get("summary")
        ]
        assert LONG in summary.reply.text
        assert summary.info["proxy"].get("branch") == (
            "side" if work is compacted_to_a_reply else None
        )
    if work is side:
        assert trajectory.turns[1].weights is not None
        assert set(trajectory.turns[1].weights) == {0.0}
    if work is subagent:
        assert [turn.agent for turn in trajectory.turns] == ["main", "agent1", "agent1", "main"]


def test_configuration_says_which_branches_are_trained() -> None:
    trained = run(side, ["One.", "A name."], settings=ProxySettings(untrained=()))[0]
    assert trained.turns[1].weights is None
    none = run(
        compacted, ["One.", LONG, "Three."], settings=ProxySettings(untrained=("compacted",))
    )[0]
    assert [turn.weights is None for turn in none.turns] == [True, True, False]


def test_a_title_before_the_first_conversation_is_a_side_call() -> None:
    async def work(talk: Conversation, http: Any, session: ProxySession) -> None:
        other = Conversation(http, tools=[])
        other.messages = [user("Name this conversation.")]
        await other.ask()
        await two(talk)

    trajectory = run(work, ["A name.", "One.", "Two."])[0]
    assert trajectory.branches == {"side": 1}
    assert [turn.weights is None for turn in trajectory.turns] == [False, True, True]


def test_differences_of_form_are_counted_and_change_nothing() -> None:
    async def work(talk: Conversation, http: Any, session: ProxySession) -> None:
        message = await talk.ask()
        call = message["tool_calls"][0]
        call["function"]["arguments"] = '{"key":"é"}'
        message["content"] = "  "
        await talk.ask({"role": "tool", "tool_call_id": call["id"], "content": "x"})
        call["function"]["arguments"] = '{"limit": 5, "key": "\\u00e9"}'
        await talk.ask(user("More."))

    trajectory = run(work, [called("look_up", key="é"), "Two.", "Three."])[0]
    assert rows(trajectory) == 1
    assert trajectory.branches == {}
    counts = {
        name: number for name, number in trajectory.metrics.items() if name.startswith("proxy_")
    }
    assert counts == {
        "proxy_arguments_form": 1,
        "proxy_arguments_defaulted": 1,
        "proxy_whitespace": 2,
    }


def test_changed_arguments_are_a_rewritten_reply() -> None:
    async def work(talk: Conversation, http: Any, session: ProxySession) -> None:
        message = await talk.ask()
        message["tool_calls"][0]["function"]["arguments"] = '{"key": "b"}'
        await talk.ask(
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
        )

    assert run(work, [called("look_up", key="a"), "Two."])[0].branches == {"rewritten_reply": 1}


def test_equal_texts_from_one_context_are_told_apart_or_branch() -> None:
    """Of two replies with one text up to white space and other ids, neither is taken for
    the program's message."""

    async def work(talk: Conversation, http: Any, session: ProxySession) -> None:
        await talk.ask()
        talk.messages.pop()
        await talk.ask()
        await talk.ask(user("More."))

    for replies, expected in (
        ([b"ab", b"ab ", b"c"], {"sampled_again": 1, "rewritten_reply": 1}),
        ([b"ab", b"ab", b"c"], {"sampled_again": 1}),
    ):
        left = iter(replies)

        def script(messages: Any, rng: Any, left: Any = left) -> list[int]:
            return list(next(left))

        trajectory = run(work, script, limits=tw.Limits(on_turn_length="continue", turn_tokens=3))[
            0
        ]
        assert trajectory.branches == expected


def test_a_repeated_request_joins_the_one_in_flight_and_a_retry_is_served_again() -> None:
    async def work(talk: Conversation, http: Any, session: ProxySession) -> None:
        body = {"model": "m", "messages": list(talk.messages)}
        first, second = await asyncio.gather(
            *(http.post("/v1/chat/completions", json=body) for _ in range(2))
        )
        assert first.json()["id"] == second.json()["id"]
        retry = await http.post(
            "/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"}
        )
        assert retry.json()["id"] == first.json()["id"]
        reordered = dict(reversed(body.items()))
        retry = await http.post(
            "/v1/chat/completions", json=reordered, headers={"x-stainless-retry-count": "1"}
        )
        assert retry.json()["id"] == first.json()["id"]
        anew = await http.post("/v1/chat/completions", json=body)
        assert anew.json()["id"] != first.json()["id"]
        talk.messages += [anew.json()["choices"][0]["message"], user("More.")]
        await http.post("/v1/chat/completions", json={"model": "m", "messages": talk.messages})
        late = await http.post(
            "/v1/chat/completions", json=body, headers={"x-stainless-retry-count": "1"}
        )
        assert late.json()["id"] != anew.json()["id"], (
            "its reply was received, since the program went on from it"
        )

    class Slow(RecordingEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            await asyncio.sleep(0.2)
            return await super().generate(request)

    engine = Slow(in_order(["One.", "Two.", "Three.", "Four."]))

    async def connected(session: ProxySession, root: str) -> None:
        async with client(root) as http:
            await work(Conversation(http), http, session)

    trajectory = direct(connected, engine)
    assert len(trajectory.turns) == 4
    assert trajectory.metrics["proxy_joined"] == 1
    assert trajectory.metrics["proxy_served_again"] == 2


def test_a_stream_that_was_cut_is_served_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves while the model samples finds the same reply when it asks again."""
    monkeypatch.setattr("turnwright_serve.proxy.server.HEARTBEAT_S", 0.05)

    class Slow(RecordingEngine):
        async def generate(self, request: tw.Request) -> tw.Generation:
            await asyncio.sleep(0.4)
            return await super().generate(request)

    engine = Slow(in_order(["One.", "Two."]))

    async def connected(session: ProxySession, root: str) -> None:
        body = {"model": "m", "max_tokens": 50, "messages": [user("Begin.")], "stream": True}
        async with client(root) as http, http.stream("POST", "/v1/messages", json=body) as response:
            async for piece in response.aiter_bytes():
                assert b"ping" in piece
                break
        async with client(root) as http:
            await asyncio.sleep(0.6)
            text = (await http.post("/v1/messages", json=body)).text
            assert "One." in text

    trajectory = direct(connected, engine)
    assert len(trajectory.turns) == 1
    assert trajectory.metrics["proxy_served_again"] == 1
    account(trajectory)


def test_a_template_with_one_system_message_gets_the_later_ones_as_user() -> None:
    from turnwright_serve.proxy.session import fold_roles

    roles = [
        ("developer", "a"),
        ("system", "b"),
        ("user", "c"),
        ("assistant", "d"),
        ("system", "e"),
    ]
    folded = fold_roles([tw.Message(role, text) for role, text in roles])
    assert [(m.role, m.text) for m in folded] == [
        ("system", "a\nb"),
        ("user", "c"),
        ("assistant", "d"),
        ("user", "e"),
    ]


_NAMES = (
    "say say answer again drop edit rewrite forge forge reorder default strip tools retry "
    "fork twice leave steal steal"
)
OPERATIONS = st.sampled_from(_NAMES.split())
FORGED: list[Callable[[dict[str, Any]], None]] = [
    lambda message: message.update(content="forged"),
    lambda message: message["tool_calls"][0]["function"].update(arguments='{"key": "forged"}'),
    lambda message: message["tool_calls"][0]["function"].update(name="forged"),
    lambda message: message["tool_calls"].append(json.loads(json.dumps(message["tool_calls"][0]))),
    lambda message: message.update(tool_calls=[], content=message["content"] or "forged"),
]
"""Changes of a reply that keeps the ids of its calls."""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 2), OPERATIONS, st.integers(0, 5)), min_size=2, max_size=14),
    st.integers(0, 2**16),
)
def test_histories_never_mix_sessions_nor_train_an_id_twice(
    steps: list[tuple[int, str, int]], seed: int
) -> None:
    """Programs that edit, drop, reorder, retry, leave and interleave: every sampled id once, under
    the context that the engine saw, which is what the program sent."""
    outcome = asyncio.run(_play(steps, seed))
    recorded = {
        id(turn.reply): trajectory for trajectory, *_ in outcome for turn in trajectory.turns
    }
    for trajectory, received, name, watched in outcome:
        assert trajectory.error is None, trajectory.error.traceback
        account(trajectory)
        assert contexts(trajectory) == received
        assert not watched.differing, "the conversation is not the program's"
        assert len(trajectory.turns) == len(watched.sampled) == len(received), (
            "a request without a turn of its own"
        )
        used = [message for messages in watched.sampled for message in messages]
        assert all(recorded.get(id(message), trajectory) is trajectory for message in used), (
            "a reply of another session"
        )
        for turn in trajectory.turns:
            prompt = byte_renderer().decode(trajectory.path(turn.prompt)[: turn.context])
            assert f"I am {name.partition('-')[0]}." in prompt, "a turn of another session"
        assert all(one.startswith(f"chatcmpl-{watched.token[:8]}") for one, _ in watched.replies), (
            "a reply of another session"
        )
        assert len(set(watched.replies)) == len(dict(watched.replies)), (
            "one reply to different requests"
        )
        named = sum("branch" in turn.info.get("proxy", {}) for turn in trajectory.turns)
        roots_and_forks = rows(trajectory) - 1 if trajectory.turns else 0
        assert named >= roots_and_forks, "a row without a reason"


class Watched(ProxySession):
    """Notes the conversations that are not those of the requests, up to what may differ."""

    def __init__(self, model: tw.Model) -> None:
        super().__init__(model)
        self.differing: list[Any] = []
        self.sampled: list[list[tw.Message]] = []
        self.replies: list[tuple[str, str]] = []

    async def _reply(self, request: WireRequest, agent: str) -> Exchange:
        exchange = await super()._reply(request, agent)
        turn = next(
            one for one in self.model.trajectory.turns if one.reply is exchange.reply.message
        )
        own = self.model.trajectory.conversation(self.model.trajectory.turns.index(turn))[:-1]
        self.sampled.append(exchange.messages)
        said = [
            (one.role, "".join(one.text.split()), [call.name for call in one.calls])
            for one in request.messages
        ]
        for conversation in (exchange.messages, own):
            held = [
                (one.role, "".join(one.text.split()), [call.name for call in one.tool_calls])
                for one in conversation
            ]
            self.differing += [(said, held)] if said != held else []
            arguments = [
                json.loads(call.arguments) for one in request.messages for call in one.calls
            ]
            known = [dict(call.arguments) for one in conversation for call in one.tool_calls]
            within = len(arguments) == len(known) and all(
                given.items() >= one.items() for given, one in zip(arguments, known, strict=True)
            )
            self.differing += [] if within else [(arguments, known)]
        offered = [tool["function"]["name"] for tool in request.tools]
        prompt = byte_renderer().decode(self.model.trajectory.path(turn.prompt)[: turn.context])
        self.differing += (
            [offered]
            if any(f'"name": "{name}"' not in prompt.partition("I am")[0] for name in offered)
            else []
        )
        return exchange


class Uneven(RecordingEngine):
    """Takes unevenly long, so that requests overtake each other."""

    async def generate(self, request: tw.Request) -> tw.Generation:
        for _ in range(request.seed % 7):
            await asyncio.sleep(0.001)
        return await super().generate(request)


async def _play(
    steps: list[tuple[int, str, int]], seed: int
) -> list[tuple[tw.Trajectory, list[list[int]], str, Watched]]:
    names = ["north", "north-2", "south"]  # two whose requests are equal

    def script(messages: Any, rng: Any) -> str:
        # Replies repeat, also in other sessions, so that texts alone do not tell them apart.
        number = rng.randrange(4)
        return called("look_up", key=f"{number}") if number < 2 else f"reply {number}"

    engine = Uneven(script)
    ready: dict[str, Watched] = {}
    over = asyncio.Event()

    async def play(task: tw.Task, model: tw.Model) -> float:
        session = ready[task.id] = Watched(model)
        await over.wait()
        await session.end()
        return 0.0

    tasks = [tw.Task(name, id=name) for name in names]
    rollout = asyncio.ensure_future(
        tw.arollout(play, tasks, engine, seed=seed, limits=tw.Limits(turns=60), sanity="off")
    )
    while len(ready) < len(names):
        await asyncio.sleep(0)
    try:
        async with ProxyServer() as server:
            clients = [client(server.open(ready[name])) for name in names]
            talks = [Conversation(http) for http in clients]
            for name, talk in zip(names, talks, strict=True):
                talk.messages[1] = user(f"I am {name.partition('-')[0]}.")
                talk.replies = ready[name].replies
            await asyncio.gather(*(talk.ask() for talk in talks))
            running: list[asyncio.Future[Any]] = []
            for number, operation, place in steps:
                stolen = [
                    one for one in talks[(number + 1) % 3].messages if one["role"] == "assistant"
                ]
                if (
                    operation == "steal"
                    and stolen
                    and talks[number].messages[-1].get("tool_calls") is None
                ):
                    talks[number].messages += [
                        user("also"),
                        json.loads(json.dumps(stolen[-1])),
                        user("stolen"),
                    ]
                talk = _changed(talks[number], operation, place)
                if operation == "fork":  # in parallel with what follows
                    running.append(asyncio.ensure_future(talk.ask(user("fork"))))
                    continue
                if operation == "twice" and talk.messages[-1]["role"] != "assistant":
                    # The same request, in flight.
                    other = _copy(talk)
                    (first, second) = await asyncio.gather(talk.ask(), other.ask())
                    assert first == second, "two replies to a request that was in flight"
                    continue
                if operation == "leave":  # the client leaves, and asks the same again
                    left = asyncio.ensure_future(_copy(talk).ask())
                    await asyncio.wait([left], timeout=0.001 * place)
                    left.cancel()
                    await asyncio.gather(left, return_exceptions=True)
                await talk.ask()
            await asyncio.gather(*running)
            for http in clients:
                await http.aclose()
    finally:
        over.set()
    trajectories = await rollout
    by_session: dict[str, list[list[int]]] = {}
    for session_name, ids in engine.received:
        by_session.setdefault(session_name.split("/")[2], []).append(ids)
    ids = [t.task.id for t in trajectories]
    received = [_in_turn_order(t, by_session.get(t.task.id, [])) for t in trajectories]
    return list(zip(trajectories, received, ids, (ready[name] for name in ids), strict=True))


def _in_turn_order(trajectory: tw.Trajectory, received: list[list[int]]) -> list[list[int]]:
    """Concurrent requests may end in another order than they began; contexts are compared
    as they were recorded."""
    left, ordered = list(received), []
    for context in contexts(trajectory):
        if context in left:
            left.remove(context)
            ordered.append(context)
    return ordered + left


def _changed(talk: Conversation, operation: str, place: int) -> Conversation:
    messages = talk.messages
    replies = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    at = replies[place % len(replies)] if replies else None
    calling = [number for number in replies if messages[number].get("tool_calls")]
    at = (
        calling[place % len(calling)]
        if calling and operation in ("forge", "reorder", "default")
        else at
    )
    calls = messages[at].get("tool_calls") if at is not None else None
    if operation == "fork":
        return _copy(talk)
    if operation == "tools":
        talk.tools = [] if talk.tools else TOOLS
    elif at is not None and operation == "drop":
        del messages[at]
    elif at is not None and operation == "rewrite":
        messages[at] = {"role": "assistant", "content": "own words"}
    elif operation == "edit" and len(messages) > 2:
        messages[-1] = user(f"edited {place}")
    elif at is not None and operation == "strip":
        messages[at]["content"] = f"\n{messages[at].get('content') or ''} "
    elif at is not None and calls:
        _change_calls(messages[at], operation, place, len(messages))
    last = messages[-1]
    if operation == "again" and last["role"] == "assistant" and len(messages) > 2:
        messages.pop()
        return talk
    if operation == "retry":
        return talk if messages[-1]["role"] != "assistant" else _said(talk, "retry")
    if last.get("tool_calls"):
        messages.append(
            {
                "role": "tool",
                "tool_call_id": last["tool_calls"][0]["id"],
                "content": f"found {place}",
            }
        )
    elif len(messages) > 2:
        messages.append(user(f"more {place}"))
    return talk


def _change_calls(message: dict[str, Any], operation: str, place: int, number: int) -> None:
    call = message["tool_calls"][0]["function"]
    if operation == "forge":
        FORGED[(place + number) % len(FORGED)](message)
    elif operation in ("reorder", "default"):
        arguments = json.loads(call["arguments"])
        given = dict(reversed(arguments.items())) | (
            {"all": False} if operation == "default" else {}
        )
        call["arguments"] = json.dumps(given, indent=place or None)


def _copy(talk: Conversation) -> Conversation:
    other = Conversation(talk.http, tools=talk.tools)
    other.replies = talk.replies
    other.messages = json.loads(json.dumps(talk.messages))
    return other


def _said(talk: Conversation, text: str) -> Conversation:
    talk.messages.append(user(text))
    return talk
