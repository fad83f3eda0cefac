"""What a request is made of: ids that are encoded once, and the echo of them that
is compared as bytes."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import remote_engines as kit

from turnwright.engines import Request
from turnwright.engines.ids import GrowingIds, ids_json
from turnwright.engines.remote import VllmEngine
from turnwright.engines.remote.http import Echo, HttpClient
from turnwright.errors import BackendContractError, EngineError

IDS = st.lists(st.integers(0, 200_000), max_size=12)
CHANGES = {
    "append": lambda ids, more: [ids.append(one) for one in more],
    "extend": lambda ids, more: ids.extend(more),
    "+=": lambda ids, more: ids.__iadd__(more),
    "cut": lambda ids, more: ids.__delitem__(slice(len(more), None)),
    "set": lambda ids, more: ids.__setitem__(slice(1, 3), more),
    "pop": lambda ids, more: ids and ids.pop(),
    "insert": lambda ids, more: ids.insert(1, 7),
    "remove": lambda ids, more: ids and ids.remove(ids[0]),
    "reverse": lambda ids, more: ids.reverse(),
    "sort": lambda ids, more: ids.sort(),
    "*=": lambda ids, more: ids.__imul__(2),
    "clear": lambda ids, more: ids.clear(),
}


@given(IDS, st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), IDS), max_size=8))
def test_the_json_of_growing_ids_is_that_of_the_ids_whatever_changed_them(first, changes):
    ids, plain = GrowingIds(first), list(first)
    for name, more in changes:
        assert ids.json() == orjson.dumps(plain)
        CHANGES[name](ids, more)
        CHANGES[name](plain, more)
    assert ids == plain
    assert ids_json(ids) == ids_json(plain) == orjson.dumps(plain)


def test_only_new_ids_are_encoded(monkeypatch):
    encoded = []
    monkeypatch.setattr(
        "turnwright.engines.ids.orjson.dumps",
        lambda ids: encoded.append(list(ids)) or b"[%d]" % len(ids),
    )
    ids = GrowingIds([1, 2, 3])
    ids.json()
    ids.extend([4, 5])
    ids.json()
    ids.json()
    assert encoded == [[1, 2, 3], [4, 5]]


ECHOES = {
    "the ids": (b'{"prompt_token_ids":[5,6,7],"x":1}', b'{"prompt_token_ids":3,"x":1}'),
    "the ids, in a choice": (
        b'{"choices":[{"prompt_token_ids":[5,6,7]}]}',
        b'{"choices":[{"prompt_token_ids":3}]}',
    ),
    "more ids": (b'{"prompt_token_ids":[5,6,7,8]}', None),
    "other ids": (b'{"prompt_token_ids":[5,6,8]}', None),
    "ids with spaces": (b'{"prompt_token_ids": [5, 6, 7]}', None),
    "none": (b'{"usage":{"prompt_tokens":3}}', None),
    "a text that has them": (b'{"text":"\\"prompt_token_ids\\":[5,6,7]"}', None),
    "null": (b'{"prompt_token_ids":null}', None),
}


@pytest.mark.parametrize("case", ECHOES)
def test_an_echo_is_taken_out_only_where_its_bytes_are_those_sent(case):
    raw, wanted = ECHOES[case]
    found = Echo(b"[5,6,7]", 3).strip(raw)
    assert found == (raw if wanted is None else wanted)
    orjson.loads(found)


@pytest.mark.parametrize("route", ["generate", "completions"])
def test_an_echo_of_other_ids_is_a_contract_error_with_compact_json_too(route, monkeypatch):
    """The servers of the kit write spaces; real ones do not."""
    answers = []

    async def work(url):
        engine = VllmEngine(url, route=route)
        await engine.open()
        ask = engine.http._ask

        async def compact(method, path, content, *rest):
            raw = orjson.dumps(orjson.loads(await ask(method, path, content, *rest)))
            answers.append(raw.replace(b'_ids":[3,4,5', b'_ids":[3,4,9') if len(answers) else raw)
            return answers[-1]

        monkeypatch.setattr(engine.http, "_ask", compact)
        request = Request(GrowingIds(kit.PROMPT), 4, frozenset({kit.END}), 1, "a")
        try:
            await engine.generate(request)
            await engine.generate(request)
        finally:
            await engine.close()

    with (
        kit.servers("vllm") as server,
        pytest.raises(BackendContractError, match="first difference at 2"),
    ):
        kit.run(work(server.url))
    assert len(answers) == 2


def test_bodies_of_megabytes_arrive_and_a_connection_is_used_again():
    async def work(url):
        http = HttpClient(url)
        ports = []
        for _ in range(2):
            await http.post("/inference/v1/abort_requests", {"request_ids": ["x" * 3_000_000]}, 20)
            ports.append(await http.get("/seen", 20))
        await http.close()
        with pytest.raises(EngineError):
            await HttpClient("http://127.0.0.1:9").get("/health", 2)  # nothing listens there
        return ports[-1]

    with kit.servers("vllm") as server:
        seen = kit.run(work(server.url))
    assert [len(row["body"]["request_ids"][0]) for row in seen] == [3_000_000] * 2


def test_a_client_serves_one_event_loop_after_the_other():
    with kit.servers("vllm") as server:
        http = HttpClient(server.url)
        for _ in range(2):
            assert asyncio.run(http.get("/version", 5)) == {"version": "0.32.0"}
