"""Servers whose answers are of another form, another request or other weights: each is the promised
error, whatever it is."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnwright.engines import Request
from turnwright.engines.remote import ChatEngine, Fleet, LlamaCppEngine, SglangEngine, VllmEngine
from turnwright.engines.remote.fleet_settings import FleetSettings
from turnwright.errors import BackendContractError, EngineError, EngineUnavailable, StaleWeights
from turnwright.renderers import CHATML, MARKUP, SPECIAL, ByteTokenizer, ChatRenderer, ChatTemplate

PROMPT = [5, 6, 7, 8]
IDS, LOGPROBS = [9, 10, 11], [-1.0, -2.0, -0.5]


class Page(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.say(self.server.pages.get(self.path.split("?")[0], (404, {}, {})))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.say(self.server.answer(body, self.headers))

    def say(self, found):
        status, headers = 200, {}
        if isinstance(found, tuple):
            status, found, headers = found
        content = json.dumps(found).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


PAGES = {
    "/health": {},
    "/version": {"version": "0.32.0"},
    "/v1/models": {"data": [{"id": "tiny", "parent": None, "max_model_len": 256}]},
    "/openapi.json": {
        "paths": {"/inference/v1/generate": {}, "/v1/completions": {}, "/weight_info": {}}
    },
    "/weight_info": {"weight_version": "3"},
    "/model_info": {"model_path": "tiny", "weight_version": "3"},
    "/server_info": {"version": "0.5.19", "context_length": 256},
    "/props": {"build_info": "b1-test", "default_generation_settings": {"n_ctx": 256}},
}


def vllm(body, headers):
    choice = {"index": 0, "token_ids": IDS, "finish_reason": "length"}
    choice["logprobs"] = {
        "content": [{"token_id": i, "logprob": p} for i, p in zip(IDS, LOGPROBS, strict=True)]
    }
    choice["weight_versions"] = [{"version": "3", "start": 0, "end": 3}]
    usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    name = f"generate-tokens-{body['request_id']}"
    return {
        "request_id": name,
        "prompt_token_ids": body["token_ids"],
        "choices": [choice],
        "usage": usage,
    }


def completions(body, headers):
    choice = {
        "index": 0,
        "token_ids": IDS,
        "finish_reason": "length",
        "logprobs": {"token_logprobs": LOGPROBS},
    }
    choice["prompt_token_ids"] = body["prompt"]
    return {
        "id": f"cmpl-{headers['x-request-id']}",
        "choices": [choice],
        "usage": {"prompt_tokens": 4},
    }


def sglang(body, headers):
    meta = {
        "id": body["rid"],
        "finish_reason": {"type": "length"},
        "prompt_tokens": 4,
        "weight_version": "3",
    }
    meta |= {
        "cached_tokens": 1,
        "output_token_logprobs": [[p, i, None] for i, p in zip(IDS, LOGPROBS, strict=True)],
    }
    return {"output_ids": IDS, "meta_info": meta}


def llamacpp(body, headers):
    rows = [{"id": i, "logprob": p} for i, p in zip(IDS, LOGPROBS, strict=True)]
    return {
        "tokens": IDS,
        "stop_type": "limit",
        "completion_probabilities": rows,
        "tokens_evaluated": 4,
        "truncated": False,
    }


def chat(body, headers):
    return {
        "choices": [{"message": {"role": "assistant", "content": "7"}, "finish_reason": "stop"}]
    }


def renderer():
    return ChatRenderer(ByteTokenizer(SPECIAL, MARKUP), ChatTemplate(CHATML))


KINDS = {
    "generate": (vllm, lambda url: VllmEngine(url, renderer=renderer(), most=1), "0.32.0"),
    "completions": (
        completions,
        lambda url: VllmEngine(url, route="completions", renderer=renderer(), most=1),
        "0.32.0",
    ),
    "sglang": (sglang, lambda url: SglangEngine(url, renderer=renderer(), most=1), "0.5.19"),
    "llamacpp": (llamacpp, lambda url: LlamaCppEngine(url, renderer=renderer(), most=1), "b1-test"),
}


@pytest.fixture(scope="module")
def server():
    web = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    web.daemon_threads = True
    web.pages, web.answer = PAGES, None
    threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield web
    web.shutdown()
    web.server_close()


def asked(server, kind, *lies, count=1):
    """What an engine makes of answers: the first ones are well, the last ones are what
    the lies make of them."""
    honest, make, _ = KINDS[kind]
    turn = iter([*[None] * count, *lies])

    def answer(body, headers):
        lie, told = next(turn), copy.deepcopy(honest(body, headers))
        return told if lie is None else lie(told)

    server.answer = answer
    url = f"http://127.0.0.1:{server.server_address[1]}"

    async def work():
        engine, found = make(url), []
        try:
            for _ in range(count + len(lies)):
                request = Request(PROMPT, 3, frozenset({200}), 7, "s")
                found += await asyncio.gather(engine.generate(request), return_exceptions=True)
        finally:
            await engine.close()
        return found

    return asyncio.run(work())


def changed(path, value):
    """A lie: another value at a path; `...` takes it out."""

    def lie(told):
        *inner, last = path
        place = told
        for name in inner:
            place = place[name]
        if value is ...:
            del place[last]
        else:
            place[last] = value
        return told

    return lie


def doubled(told):
    told["choices"] *= 2
    return told


CHOICE = ("choices", 0)
LIES = {
    "no version, as the others had": [
        ("generate", changed((*CHOICE, "weight_versions"), ...)),
        ("sglang", changed(("meta_info", "weight_version"), ...)),
    ],
    "a version that is none": [
        ("generate", changed((*CHOICE, "weight_versions"), [{"start": 0}])),
        ("generate", changed((*CHOICE, "weight_versions"), "3")),
    ],
    "another request's": [
        ("generate", changed(("request_id",), "x")),
        ("completions", changed(("id",), "cmpl-x")),
        ("sglang", changed(("meta_info", "id"), "x")),
    ],
    "no request's, as the others had": [
        ("generate", changed(("request_id",), ...)),
        ("completions", changed(("id",), ...)),
        ("sglang", changed(("meta_info", "id"), ...)),
    ],
    "two choices": [("generate", doubled), ("completions", doubled)],
    "no choice": [
        ("generate", changed(("choices",), [])),
        ("completions", changed(("choices",), {})),
    ],
    "an id outside the vocabulary": [
        ("completions", changed((*CHOICE, "token_ids"), [9, 10, 50_000])),
        (
            "llamacpp",
            lambda told: (
                told
                | {
                    "tokens": [9, 10, 2**40],
                    "completion_probabilities": [
                        {"id": i, "logprob": -1.0} for i in (9, 10, 2**40)
                    ],
                }
            ),
        ),
        (
            "sglang",
            lambda told: {
                "output_ids": [9, 10, 900],
                "meta_info": told["meta_info"]
                | {"output_token_logprobs": [[-1.0, i, None] for i in (9, 10, 900)]},
            },
        ),
        (
            "generate",
            lambda told: changed(
                (*CHOICE, "logprobs"),
                {"content": [{"token_id": i, "logprob": -1.0} for i in (9, 10, 900)]},
            )(changed((*CHOICE, "token_ids"), [9, 10, 900])(told)),
        ),
    ],
    "an echo of truths": [
        ("completions", changed((*CHOICE, "prompt_token_ids"), [5.0, 6.0, 7.0, 8.0])),
        ("generate", changed(("prompt_token_ids",), "5678")),
    ],
    "a list where an object is": [(kind, lambda told: [told]) for kind in KINDS],
    "a text where an object is": [(kind, lambda told: "well") for kind in KINDS],
    "null": [(kind, lambda told: None) for kind in KINDS],
    "logprobs of another form": [
        ("generate", changed((*CHOICE, "logprobs"), [1])),
        ("completions", changed((*CHOICE, "logprobs"), "x")),
        ("sglang", changed(("meta_info", "output_token_logprobs"), 7)),
        ("llamacpp", changed(("completion_probabilities",), [3])),
    ],
    "ids of another form": [
        ("generate", changed((*CHOICE, "token_ids"), 7)),
        ("completions", changed((*CHOICE, "token_ids"), {"9": 1})),
        ("sglang", changed(("output_ids",), "abc")),
        ("llamacpp", changed(("tokens",), 5)),
    ],
    "more cached than there was": [
        ("generate", changed(("usage", "prompt_tokens_details", "cached_tokens"), 400)),
        ("sglang", changed(("meta_info", "cached_tokens"), -1)),
    ],
    "usage of another form": [
        (
            "generate",
            lambda told: changed(("prompt_token_ids",), None)(changed(("usage",), [1])(told)),
        )
    ],
    "meta of another form": [
        ("sglang", changed(("meta_info",), [1])),
        ("sglang", changed(("meta_info", "finish_reason"), 3)),
    ],
}


@pytest.mark.parametrize(
    ("name", "kind", "lie"),
    [(name, kind, lie) for name, rows in LIES.items() for kind, lie in rows],
)
def test_a_lie_is_the_promised_error_and_the_next_answer_counts(server, name, kind, lie):
    well, failed, again = asked(server, kind, lie, None)
    assert (well.ids, list(well.logprobs)) == (IDS, LOGPROBS)
    assert isinstance(failed, BackendContractError), (name, kind, failed)
    assert "127.0.0.1" in str(failed)
    assert KINDS[kind][2] in str(failed)
    assert again.ids == IDS


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value, path=()):
    """Paths of everything inside a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from(sorted(KINDS)))
def test_whatever_stands_anywhere_in_an_answer_is_no_raw_error(server, data, kind):
    sample = KINDS[kind][0](
        {"request_id": "x", "rid": "x", "token_ids": PROMPT, "prompt": PROMPT},
        {"x-request-id": "x"},
    )
    path = data.draw(st.sampled_from(sorted(places(sample), key=repr)))
    lie = changed(path, data.draw(json_values | st.just(...)))
    well, found = asked(server, kind, lie)
    assert well.ids == IDS
    if isinstance(found, Exception):
        assert isinstance(found, (BackendContractError, StaleWeights)), (type(found), found)
        assert KINDS[kind][2] in str(found)
    else:
        assert all(type(one) is int for one in found.ids)
        assert all(type(one) is float and math.isfinite(one) for one in found.logprobs)


@pytest.mark.parametrize("broken", [[], "x", 3, [1], {"data": 3}, {"data": [3]}, {"paths": 3}])
@pytest.mark.parametrize("kind", ["generate", "sglang", "llamacpp"])
def test_pages_of_another_form_are_told_of(server, kind, broken):
    server.pages = dict.fromkeys(PAGES, broken)
    try:
        (found,) = asked(server, kind)
    finally:
        server.pages = PAGES
    assert isinstance(found, EngineError) or getattr(found, "ids", None) == IDS, (
        type(found),
        found,
    )


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("fleet", [False, True])
def test_a_server_that_says_when_is_asked_again_then(server, status, fleet):
    times, wait = [], ["0.5"]

    def answer(body, headers):
        if "token_ids" not in body:
            # A fleet has known ids scored, and a call that failed is aborted.
            rows = [None, *({str(one): {"logprob": -1.0}} for one in body.get("prompt", [0])[1:])]
            return {"choices": [{"token_ids": [], "prompt_logprobs": rows}]}
        times.append(time.monotonic())
        return (
            (status, {"error": "later"}, {"retry-after": wait[0]})
            if len(times) == 1
            else vllm(body, headers)
        )

    server.answer = answer
    url = f"http://127.0.0.1:{server.server_address[1]}"

    async def work(**more):
        engine = VllmEngine(url, most=1)
        one = Fleet([engine], FleetSettings(check_s=0.05)) if fleet else engine
        try:
            return await one.generate(Request(PROMPT, 3, frozenset({200}), 7, "s", **more))
        finally:
            await one.close()

    assert asyncio.run(work()).ids == IDS
    assert times[1] - times[0] >= 0.5
    if not fleet:
        times.clear()
        wait[0] = "500"

        async def late():
            return await work(deadline=asyncio.get_running_loop().time() + 60)

        with pytest.raises(EngineUnavailable, match=str(status)):
            asyncio.run(late())
        assert len(times) == 1


def test_a_chat_endpoint_with_two_choices_is_refused(server):
    server.answer = lambda body, headers: doubled(chat(body, headers))

    async def work():
        engine = ChatEngine(
            f"http://127.0.0.1:{server.server_address[1]}", "m", renderer=renderer()
        )
        try:
            from turnwright.types import Message

            return await engine.generate(
                Request(PROMPT, 3, frozenset(), 7, "s", messages=[Message("user", "hi")])
            )
        finally:
            await engine.close()

    with pytest.raises(BackendContractError, match="choices"):
        asyncio.run(work())
