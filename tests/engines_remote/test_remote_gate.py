"""`turnwright serve` before whoever asks: no request ends it, and no page of another
site changes anything."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading

import pytest

pytest.importorskip("torch")
from turnwright.config import ModelConfig
from turnwright.engines import Request
from turnwright.engines.remote import SglangEngine, VllmEngine
from turnwright.errors import EngineError
from turnwright.training import create_tiny_model
from turnwright_serve import make_service
from turnwright_serve.server import JsonHttpServer

TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]
WELL = {"prompt": list(range(10, 30)), "max_tokens": 9, "seed": 5, "ignore_eos": True}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server in a thread with a loop of its own, and what answers in it."""
    directory = create_tiny_model(
        ModelConfig(hidden=32, layers=1), TEXTS, tmp_path_factory.mktemp("gate") / "model", seed=3
    )
    ready, over = threading.Event(), asyncio.Event()
    held = {}

    async def work():
        app, engine = make_service(directory, context=64, device="cpu")
        server = JsonHttpServer(app.routes("vllm"), host="127.0.0.1", port=0)
        await server.start()
        held.update(
            app=app,
            server=server,
            loop=asyncio.get_running_loop(),
            directory=directory,
            url=server.url,
        )
        ready.set()
        await over.wait()
        await server.close()
        await engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    ready.wait()
    yield held
    held["loop"].call_soon_threadsafe(over.set)
    thread.join()


def port_of(running):
    return int(running["url"].rpartition(":")[2])


def with_token(running):
    return JSON | {"authorization": f"Bearer {running['server'].token}"}


def ask(running, method, path, content=b"", headers=None, seconds=20):
    """Status and body; a connection that is dropped is the status 0, no answer at all is -1.

    By default the request has the server's token.
    """
    headers = with_token(running) if headers is None else headers
    connection = http.client.HTTPConnection("127.0.0.1", port_of(running), timeout=seconds)
    try:
        connection.request(
            method, path, content if isinstance(content, bytes) else json.dumps(content), headers
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError:
        return -1, b""
    except (http.client.HTTPException, ConnectionError):
        return 0, b""
    finally:
        connection.close()


def well(running):
    status, body = ask(running, "POST", "/v1/completions", WELL)
    choice = json.loads(body)["choices"][0] if status == 200 else {}
    return status, choice.get("token_ids"), choice.get("logprobs")


WRONG = {
    "a bias outside the vocabulary": WELL | {"logit_bias": {"5000": -100.0}},
    "a bias below 0": WELL | {"logit_bias": {"-1": -100.0}},
    "a bias of no id": WELL | {"logit_bias": {"x": -100.0}},
    "biases that are no object": WELL | {"logit_bias": [3]},
    "a bias of nothing": WELL | {"logit_bias": {"3": None}},
    "every id banned": WELL | {"logit_bias": {str(n): -100.0 for n in range(4096)}},
    "a prompt past the context, scored": WELL
    | {"prompt": list(range(60)) * 3000, "prompt_logprobs": 0},
    "a prompt outside the vocabulary, scored": WELL | {"prompt": [5, 10**6], "prompt_logprobs": 0},
    "an array": [],
    "null": None,
    "a text": "x",
    "a number": 3,
    "a temperature below 0": WELL | {"temperature": -1},
    "a temperature that is a text": WELL | {"temperature": "1"},
    "top_p 0": WELL | {"top_p": 0},
    "top_k -7": WELL | {"top_k": -7},
    "min_p 1": WELL | {"min_p": 1.0},
    "half a token": WELL | {"max_tokens": 1.5},
    "a seed of a hundred digits": WELL | {"seed": 10**100},
    "truths for ids": WELL | {"prompt": [True, False]},
    "texts for ids": WELL | {"prompt": ["1"]},
    "no prompt": {},
    "no ids": WELL | {"prompt": []},
    "an empty stop text": WELL | {"stop": [""]},
    "stops that are numbers": WELL | {"stop": [1]},
    "no answers": WELL | {"n": 0},
    "too many answers": WELL | {"n": 65},
    "the best of two answers": WELL | {"best_of": 2},
    "a stream": WELL | {"stream": True},
    "no id, and nothing scored": WELL | {"max_tokens": 0},
    "some ids alone": WELL | {"allowed_token_ids": [3]},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_body_is_told_so_and_everybody_else_is_answered_as_before(running, name):
    before = well(running)
    assert before[0] == 200
    status, body = ask(running, "POST", "/v1/completions", json.dumps(WRONG[name]).encode())
    assert status == 400, (status, body)
    assert json.loads(body)["error"]
    assert well(running) == before
    assert ask(running, "GET", "/health")[0] == 200


def test_a_prompt_is_scored_alone_where_no_id_is_asked_for(running):
    def scored(count):
        body = {"prompt": WELL["prompt"], "prompt_logprobs": 0, "max_tokens": count}
        status, answer = ask(running, "POST", "/v1/completions", json.dumps(body).encode())
        assert status == 200, answer
        (choice,) = json.loads(answer)["choices"]
        return choice["token_ids"], choice["prompt_logprobs"]

    alone, with_an_id = scored(0), scored(1)
    assert (alone[0], len(with_an_id[0])) == ([], 1)
    assert alone[1] == with_an_id[1]
    assert len(alone[1]) == len(WELL["prompt"])


def test_several_answers_of_one_request_are_those_of_requests_with_the_seeds_that_follow(running):
    def choices(**given):
        status, body = ask(running, "POST", "/v1/completions", json.dumps(WELL | given).encode())
        assert status == 200, body
        return [(one["token_ids"], one["logprobs"]) for one in json.loads(body)["choices"]]

    singly = [choices(seed=seed)[0] for seed in (7, 8, 9)]
    assert choices(seed=7, n=3) == singly
    assert len(choices(n=2)) == 2
    assert len({str(one) for one in singly}) == 3
    tokens = {"token_ids": WELL["prompt"], "sampling_params": {"n": 2}}
    assert ask(running, "POST", "/inference/v1/generate", json.dumps(tokens).encode())[0] == 400


def test_requests_that_are_no_http_are_refused_and_no_other_suffers(running):
    before = well(running)
    content = json.dumps(WELL).encode()
    sizes = f"Content-Length: 3\r\nContent-Length: {len(content)}\r\n"
    for head in (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: "
        f"application/json\r\n{sizes}\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port_of(running)), timeout=20) as connection:
            connection.sendall(head.encode() + content)
            assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]
    assert well(running) == before


def test_health_is_no_lie_where_the_engine_is_gone(running):
    engine = running["app"].engine
    check = getattr(engine, "check", None)

    def gone():
        raise EngineError("gone")

    engine.check = gone
    try:
        assert ask(running, "GET", "/health")[0] == 503
    finally:
        engine.check = check
    assert ask(running, "GET", "/health")[0] == 200


CHANGES = {
    "/pause": b"{}",
    "/resume": b"{}",
    "/sleep": b"{}",
    "/wake_up": b"{}",
    "/update_weight_version": b'{"new_version": "evil"}',
    "/collective_rpc": b'{"method": "reload_weights", "kwargs": {"weights_path": "/tmp"}}',
    "/inference/v1/abort_requests": b'{"request_ids": ["a"]}',
    "/reset_prefix_cache": b"{}",
    "/init_weight_transfer_engine": b"{}",
    "/start_weight_update": b"{}",
    "/update_weights": b"{}",
    "/finish_weight_update": b"{}",
    "/shutdown_weight_transfer_engine": b"{}",
}


@pytest.mark.parametrize("path", [*CHANGES, "/v1/completions", "/inference/v1/generate"])
def test_every_request_takes_the_token(running, path):
    for headers in (
        JSON,
        JSON | {"authorization": "Bearer wrong"},
        JSON | {"authorization": "Bearer "},
    ):
        assert ask(running, "POST", path, CHANGES.get(path, b"{}"), headers)[0] == 401, headers
        assert ask(running, "GET", "/health", b"", headers)[0] == 401, headers
    assert json.loads(ask(running, "GET", "/weight_info")[1]) == {"weight_version": "default"}
    assert well(running)[0] == 200
    assert {
        path for method, path in running["app"].routes("vllm") if method == "POST"
    } == CHANGES.keys() | {
        "/v1/completions",
        "/inference/v1/generate",
    }


FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:8000"},
    {"host": "127.0.0.1.evil.example"},
    {"host": ""},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_is_not_answered(running, headers):
    for method, path in (
        ("POST", "/v1/completions"),
        ("POST", "/update_weight_version"),
        ("GET", "/weight_info"),
    ):
        content = json.dumps(WELL | {"new_version": "evil"}).encode() if method == "POST" else b""
        assert ask(running, method, path, content, with_token(running) | headers)[0] == 403, path
    assert json.loads(ask(running, "GET", "/weight_info")[1]) == {"weight_version": "default"}


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_is_declared_to_be_json(running, kind):
    assert (
        ask(running, "POST", "/v1/completions", WELL, with_token(running) | {"content-type": kind})[
            0
        ]
        == 415
    )


def test_the_clients_of_this_user_find_the_token_and_others_do_not(running, monkeypatch, tmp_path):
    async def renamed(key_env=None):
        client = VllmEngine(running["url"], key_env=key_env)
        try:
            await client.open()
            await client.pause("wait")
            await client.resume()
            return len(
                (await client.generate(Request(list(range(10, 20)), 3, frozenset(), 1, "a"))).ids
            )
        finally:
            await client.close()

    assert asyncio.run(renamed()) == 3
    monkeypatch.setenv("KIT_KEY", "wrong")
    with pytest.raises(EngineError, match="401"):
        asyncio.run(renamed("KIT_KEY"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(EngineError, match="401"):
        asyncio.run(renamed())


def test_the_file_of_a_token_is_its_users_alone_and_goes_with_the_server(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    async def work():
        server = JsonHttpServer({}, host="127.0.0.1", port=0)
        await server.start()
        (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
        found = file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777
        await server.close()
        return found, file.exists()

    assert asyncio.run(work()) == ((0o600, 0o700), False)


def test_a_token_of_the_callers_stands_before_everything_and_in_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    async def work():
        server = JsonHttpServer({}, host="127.0.0.1", port=0, token="hush")
        await server.start()
        client = SglangEngine(server.url)
        try:
            with pytest.raises(EngineError, match="401"):
                await client.http.get("/health", 5)
        finally:
            await client.close()
            await server.close()
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    assert asyncio.run(work()) == []


def test_requests_of_every_kind_leave_it_answering():
    from serve_fuzz import fuzz

    statuses, _ = fuzz(100)
    assert statuses["200"] > 0
    assert sum(statuses.values()) >= 100
