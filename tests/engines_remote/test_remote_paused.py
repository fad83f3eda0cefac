"""A server is paused while it takes weights, and never left paused without an error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from turnwright.engines.remote import SglangEngine, VllmEngine
from turnwright.engines.remote.weight_sync import WeightBucket
from turnwright.errors import EngineError, SyncError

ROUTES = {
    "/init_weight_transfer_engine",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/pause",
    "/resume",
}
LOADS = {
    ("vllm", "disk"): "/collective_rpc",
    ("vllm", "group"): "/update_weights",
    ("sglang", "disk"): "/update_weights_from_disk",
    ("sglang", "group"): "/update_weights_from_distributed",
    ("sglang", "requests"): "/update_weights_from_tensor",
}
"""The request that carries weights, by kind of server and way of the weights."""
RESUME = {"vllm": "/resume", "sglang": "/continue_generation"}


class Group:
    name, address, port, world, backend = "group", "127.0.0.1", 1, 2, "gloo"

    async def connect(self) -> None: ...

    async def send(self, index: int) -> None: ...

    def close(self) -> None: ...


class Transfer:
    """Weights of policy 1, in one bucket or request."""

    version, seconds, request_count = 1, 5.0, 1
    buckets = (WeightBucket(("w",), ("float32",), ((1,),)),)

    def group(self, url: str, ranks: int) -> Group:
        return Group()

    def encode_body(self, index: int) -> str:
        return "body"


Client = tuple[Any, list[str]]


def client_of(kind: str, failing: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> Client:
    """Return an open client and the paths that it posts to, of which some fail."""
    client: Any = {"vllm": VllmEngine, "sglang": SglangEngine}[kind]("http://127.0.0.1:9")
    posted: list[str] = []

    async def post(path: str, *rest: Any, **options: Any) -> dict[str, Any]:
        path = path.partition("?")[0]
        posted.append(path)
        if path in failing:
            raise EngineError(f"{path} failed")
        return {"success": True}

    async def get(path: str, seconds: float) -> dict[str, Any]:
        return {"world_size": 1, "tp_size": 1, "weight_version": "1"}

    client._opened, client.routes = True, ROUTES
    for name, stub in {"post": post, "post_status": post, "get": get, "page": get}.items():
        monkeypatch.setattr(client.http, name, stub)
    return client, posted


def send(client: Any, way: str) -> None:
    if way == "disk":
        asyncio.run(client.load_from_disk(Path("weights"), 1))
    elif way == "group":
        asyncio.run(client.load_from_group(Transfer()))
    else:
        asyncio.run(client.load_from_requests(Transfer()))


@pytest.mark.parametrize(("kind", "way"), LOADS)
def test_it_is_paused_and_resumed(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, posted = client_of(kind, frozenset(), monkeypatch)
    send(client, way)
    assert posted[0] in ("/pause", "/pause_generation")
    assert LOADS[kind, way] in posted
    assert posted[-1] == RESUME[kind]
    assert client.version == 1


@pytest.mark.parametrize(("kind", "way"), LOADS)
def test_a_server_that_has_the_weights_and_stays_paused_has_failed_the_update(
    kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = client_of(kind, frozenset({RESUME[kind]}), monkeypatch)
    told = f"did not take the weights of policy 1: {RESUME[kind]} failed"
    with pytest.raises(SyncError, match=told):
        send(client, way)
    assert client.version == 0


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize(("kind", "way"), LOADS)
def test_weights_that_are_refused_are_the_error_whether_or_not_the_server_resumes(
    kind: str, way: str, resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {LOADS[kind, way]} | (set() if resumes else {RESUME[kind]})
    client, posted = client_of(kind, frozenset(failing), monkeypatch)
    with pytest.raises(SyncError, match=f"{LOADS[kind, way]} failed"):
        send(client, way)
    assert posted[-1] == RESUME[kind]


@pytest.mark.parametrize(("kind", "way"), LOADS)
def test_waking_resumes_what_sleeps(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, posted = client_of(kind, frozenset({LOADS[kind, way]}), monkeypatch)
    client.asleep = client._weights_awake = True

    async def sleeps() -> bool:
        return True

    monkeypatch.setattr(client, "_sleeps", sleeps)
    with pytest.raises(SyncError, match=f"{LOADS[kind, way]} failed"):
        send(client, way)
    assert RESUME[kind] not in posted
