"""Requests of every kind against `turnwright serve`: bodies, headers, sizes and raw bytes
that hypothesis makes up.

Both formats answer on real sockets with a tiny model behind them. Each request has to be answered
with JSON and a status that blames it (or be dropped, where it is no whole request), and a known
request has the same ids and logprobs, to the bit, before, between and after.

    .venv/bin/python benchmarks/serve_fuzz.py              # 10,000 requests
    .venv/bin/python benchmarks/serve_fuzz.py --requests 500 --seed 3

Then `turnwright serve`, the proxy of programs and `turnwright record` are flooded
(`serve_floods.py`): with sums of bodies, bodies of many values, slow bodies and heads,
connections, and bodies without access. Of each, the last line has by how many MiB the server's
process grew (`grown_mib`; `bound_mib` is what docs/reference/servers.md states), and how long a
small request of others waited at most (`longest_s`). The exit status is 1 where one is over its
bound, or a request of others failed.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import serve_floods
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

TEXTS = [
    f"code of amber {n}\nlookup birch\nsee cedar {n * 7 % 10}\nanswer {n % 10}" for n in range(60)
]
CANARY = {
    "token_ids": list(range(10, 30)),
    "sampling_params": {"max_tokens": 12, "seed": 7, "ignore_eos": True},
}
SECONDS = 30.0
"""For one answer, on a machine that is busy."""
BROKEN = frozenset(
    [
        "/collective_rpc",
        "/update_weights",
        "/finish_weight_update",
        "/init_weight_transfer_engine",
        "/update_weights_from_disk",
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
    ]
)
"""Paths that may answer 500: what they were told of is not there."""


@dataclass
class Both:
    """Servers of both formats, each with an engine of its own, in a thread with its own loop."""

    servers: dict[str, Any] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> Both:
        self._folder = tempfile.TemporaryDirectory()
        self._ready, self._thread = (
            threading.Event(),
            threading.Thread(target=lambda: asyncio.run(self._run())),
        )
        self._thread.start()
        self._ready.wait()
        self.known = self.canary()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._folder.cleanup()

    async def _run(self) -> None:
        from turnwright.config import ModelConfig
        from turnwright.training import create_tiny_model
        from turnwright_serve import make_service
        from turnwright_serve.server import JsonHttpServer

        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        source = create_tiny_model(
            ModelConfig(hidden=32, layers=1), TEXTS, Path(self._folder.name) / "model", seed=3
        )
        engines = []
        for kind in ("vllm", "sglang"):
            app, engine = make_service(source, context=100, device="cpu")
            app.receiver._seconds = 0.2  # nobody waits at the addresses that are made up
            self.servers[kind] = server = JsonHttpServer(app.routes(kind), host="127.0.0.1", port=0)
            self.source, self.paths = (
                str(source),
                getattr(self, "paths", []) + [(kind, *pair) for pair in app.routes(kind)],
            )
            await server.start()
            engines.append(engine)
        self._ready.set()
        await self._over.wait()
        for server in self.servers.values():
            await server.close()
        for engine in engines:
            await engine.close()

    def post(self, kind: str, path: str, body: Any) -> Any:
        """The answer to a request that is well."""
        server = self.servers[kind]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
        headers = {"content-type": "application/json", "authorization": f"Bearer {server.token}"}
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        said = json.loads(answer.read())
        connection.close()
        assert answer.status == 200, (kind, path, answer.status, said)
        return said

    def canary(self) -> tuple[Any, ...]:
        """What both say to a known request, and of their health."""
        vllm = self.post("vllm", "/inference/v1/generate", CANARY)["choices"][0]
        asked = {"max_new_tokens": 12, "sampling_seed": 7, "ignore_eos": True}
        sglang = self.post(
            "sglang", "/generate", {"input_ids": CANARY["token_ids"], "sampling_params": asked}
        )
        pairs = [(row["token_id"], row["logprob"]) for row in vllm["logprobs"]["content"]]
        others = [(row[1], row[0]) for row in sglang["meta_info"]["output_token_logprobs"]]
        assert pairs == others, (pairs, others)
        for server in self.servers.values():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SECONDS)
            connection.request(
                "GET", "/health", headers={"authorization": f"Bearer {server.token}"}
            )
            assert connection.getresponse().status == 200
            connection.close()
        return tuple(pairs)

    def settle(self) -> None:
        """Undo what a request with the token may have done."""
        self.post("vllm", "/wake_up", {})
        self.post("vllm", "/resume", {})
        self.post("sglang", "/resume_memory_occupation", {})
        self.post("sglang", "/continue_generation", {})

    def send(self, kind: str, raw: bytes, whole: bool = True) -> tuple[int, bytes] | None:
        """Status and body of what is answered to bytes; None where the connection is
        closed without an answer.

        Args:
            whole: whether nothing more has to come; else the connection is closed behind them.

        Raises:
            TimeoutError: when neither happens.
        """
        with socket.create_connection(
            ("127.0.0.1", self.servers[kind].port), timeout=SECONDS
        ) as connection:
            try:
                connection.sendall(raw)
                if not whole:
                    connection.shutdown(socket.SHUT_WR)
                answer = http.client.HTTPResponse(
                    connection, method=raw.split(b" ")[0].decode("latin-1", "replace")
                )
                answer.begin()
                return answer.status, answer.read()
            except TimeoutError:
                raise
            except (http.client.HTTPException, OSError):
                return None


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 120),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "NaN",
            "../../etc/passwd",
            "a\x00b",
            "abort",
            "wait",
            "weights",
            "127.0.0.1",
            "x" * 3000,
        ]
    ),
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)
KEYS = [
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_new_tokens",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "seed",
    "sampling_seed",
    "ignore_eos",
    "n",
    "min_p",
    "prompt",
    "token_ids",
    "input_ids",
    "sampling_params",
    "model",
    "request_id",
    "rid",
    "prompt_logprobs",
    "logprob_start_len",
    "stream",
    "mode",
    "tags",
    "method",
    "kwargs",
    "model_path",
    "weight_version",
    "new_version",
    "abort_all",
    "request_ids",
    "features",
    "image_data",
    "init_info",
    "update_info",
    "names",
    "dtypes",
    "dtype_names",
    "shapes",
    "group_name",
    "serialized_named_tensors",
    "master_address",
    "master_port",
    "rank_offset",
    "world_size",
]
sampling = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.floats(-1, 3), st.just(0), scalars),
        "top_p": st.one_of(st.floats(0, 1), scalars),
        "top_k": st.one_of(st.integers(-2, 200), scalars),
        "max_tokens": st.integers(-1, 40),
        "max_new_tokens": st.integers(-1, 40),
        "logit_bias": st.dictionaries(
            st.integers(-2, 400).map(str) | st.text(max_size=3),
            st.sampled_from([-100.0, -1e9, 1.0, None]),
        ),
        "stop_token_ids": st.lists(st.integers(-2, 400), max_size=4),
        "stop": st.one_of(st.text(max_size=3), st.lists(st.text(max_size=3), max_size=3), scalars),
        "seed": scalars,
        "sampling_seed": scalars,
        "ignore_eos": st.booleans(),
        "n": st.integers(0, 2),
    },
)
ids = st.one_of(
    st.lists(st.integers(0, 60), min_size=1, max_size=130),
    st.lists(st.integers(-3, 500), max_size=6),
    anything,
)


@st.composite
def bodies(draw: Any, path: str) -> bytes:
    """A body: nearly right, some JSON, or bytes."""
    style = draw(st.sampled_from(["near", "near", "near", "json", "bytes", "deep", "plain"]))
    if style == "bytes":
        return draw(st.binary(max_size=200))
    if style == "deep":
        return draw(
            st.sampled_from(
                [
                    b"[" * 5000,
                    b'{"prompt":' * 3000,
                    b"[" * 9000 + b"]" * 9000,
                    b'{"a":1,"a":2}',
                    b"1e999",
                    b"-",
                ]
            )
        )
    if style == "plain":
        return draw(
            st.sampled_from(
                [
                    b"[]",
                    b"null",
                    b'"x"',
                    b"",
                    b" ",
                    b"0",
                    b"true",
                    b"{}",
                    b'{"x": NaN}',
                    b"\xff\xfe{}",
                ]
            )
        )
    if style == "json":
        return json.dumps(draw(anything)).encode()
    key = {
        "/v1/completions": "prompt",
        "/inference/v1/generate": "token_ids",
        "/generate": "input_ids",
    }.get(path)
    body: dict[str, Any] = {} if key is None else {key: draw(ids)}
    settings_ = draw(sampling)
    body |= settings_ if path == "/v1/completions" else {"sampling_params": settings_}
    body |= draw(st.dictionaries(st.sampled_from(KEYS), anything, max_size=2))
    if draw(st.integers(0, 5)) == 0:
        body["prompt_logprobs"] = body["logprob_start_len"] = 0
    return json.dumps(body).encode()


@st.composite
def requests(draw: Any, both: Both) -> tuple[str, str, bytes, bool]:
    """A format, a path, the bytes of a request, and whether they are all of one."""
    kind, method, path = draw(st.sampled_from(both.paths))
    server = both.servers[kind]
    if draw(st.integers(0, 19)) == 0:
        return kind, path, draw(st.binary(max_size=300)), False
    asks = ("/v1/completions", "/inference/v1/generate") if kind == "vllm" else ("/generate",)
    if draw(st.booleans()):
        method, path = "POST", draw(st.sampled_from(asks))
    if draw(st.integers(0, 9)) == 0:
        method = draw(
            st.sampled_from(["GET", "PUT", "HEAD", "OPTIONS", "DELETE", "post", "POST\t", "\x00"])
        )
    query = draw(
        st.sampled_from(
            [
                "",
                "",
                "",
                "?mode=abort",
                "?mode=x",
                "?level=9",
                "?tags=kv_cache",
                "?tags=%00",
                "?a[]=1&&=",
                "#x",
            ]
        )
    )
    content = draw(bodies(path))
    host = draw(
        st.sampled_from(
            [f"127.0.0.1:{server.port}"] * 8
            + ["localhost", "evil.example", "", "[::1]:1", "127.0.0.1.evil.example"]
        )
    )
    headers = [("Host", host)]
    headers += [
        (
            "Content-Type",
            draw(
                st.sampled_from(
                    ["application/json"] * 8 + ["text/plain", "", "application/json; charset=utf-8"]
                )
            ),
        )
    ]
    size = draw(
        st.sampled_from(
            [len(content)] * 12 + [0, len(content) + 5, max(0, len(content) - 1), -1, 2**40, 2**70]
        )
    )
    headers += [("Content-Length", str(size))]
    more = {
        "Authorization": [f"Bearer {server.token}"] * 3
        + ["Bearer x", "Basic eDp4", "Bearer", "\xff"],
        "Origin": ["null", "http://evil.example", f"http://127.0.0.1:{server.port}"],
        "Sec-Fetch-Site": ["cross-site", "none"],
        "Content-Length": [str(len(content)), "1"],
        "Transfer-Encoding": ["chunked", "gzip"],
        "Connection": ["close", "keep-alive", "upgrade"],
        "Expect": ["100-continue", "x"],
        "x-request-id": ["a", "\xe9" * 300, ""],
        "x-session-id": ["s", "\x01"],
        "x-big": ["y" * 70_000],
        "bad name": ["x"],
    }
    for name in draw(st.lists(st.sampled_from(sorted(more)), max_size=2)):
        headers.append((name, draw(st.sampled_from(more[name]))))
    if draw(st.booleans()):
        headers.append(("Authorization", f"Bearer {server.token}"))
    head = (
        f"{method} {path}{query} HTTP/1.1\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers)
        + "\r\n"
    )
    whole = size == len(content) and "Transfer-Encoding" not in dict(headers) and method.isalpha()
    return kind, path, head.encode("latin-1") + content, whole


def one(both: Both, request: tuple[str, str, bytes, bool]) -> None:
    """Send a request, and hold its answer to what is promised."""
    kind, path, raw, whole = request
    answer = both.send(kind, raw, whole)
    if both.servers[kind].token.encode() in raw:
        both.settle()
    both.statuses[str(answer and answer[0])] += 1
    if answer is None:
        return
    status, body = answer
    assert status in (200, 400, 401, 403, 404, 405, 413, 415, 431) or (
        status == 500 and path in BROKEN
    ), (status, body, raw)
    if body and status != 200 and body[:1] == b"{":
        assert json.loads(body).keys() <= {"error", "detail"}, body


def fuzz(count: int, number: int | None = None) -> tuple[Counter[str], float]:
    """Send so many requests; the seconds that it took.

    Raises:
        AssertionError: where one is answered otherwise than promised, or the known request is.
    """
    began = time.monotonic()
    with Both() as both:
        done = 0

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=number is None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.data())
        def each(data: Any) -> None:
            nonlocal done
            one(both, data.draw(requests(both)))
            done += 1
            if done % 50 == 0:
                assert both.canary() == both.known

        (each if number is None else seed(number)(each))()
        assert both.canary() == both.known
        assert done >= count, done
        return both.statuses, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--flood-seconds", type=float, default=5.0, help="seconds of each flood; 0 leaves them out"
    )
    args = parser.parse_args()
    statuses, seconds = fuzz(args.requests, args.seed)
    row: dict[str, Any] = {"requests": sum(statuses.values()), "seconds": round(seconds, 1)}
    row["statuses"] = dict(statuses.most_common())
    fine = True
    if args.flood_seconds:
        row["floods"] = floods = {
            kind: serve_floods.measure(kind, args.flood_seconds) for kind in serve_floods.KINDS
        }
        row["longest_s"] = max(one["longest_s"] for one in floods.values())
        row["grown_mib"] = max(one["grown_mib"] for one in floods.values())
        row["bound_mib"] = serve_floods.BOUND_MIB
        failed = sum(one["failed"] for one in floods.values())
        fine = (
            not failed
            and row["grown_mib"] <= row["bound_mib"]
            and row["longest_s"] <= serve_floods.LONGEST_S
        )
    print(json.dumps(row))
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
