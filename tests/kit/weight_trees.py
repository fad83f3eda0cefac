"""Directories of weights on several hosts, and the relays between them."""

from __future__ import annotations

from turnwright.engines.remote import SglangEngine, VllmEngine
from turnwright_serve.server import JsonHttpServer
from turnwright_serve.sharing import WeightRelay

SMALL = 1000


def directory(path, seed, size=9 * SMALL + 17, changed=None):
    """A directory whose files are bytes of a seed, but one chunk of them."""
    import random

    path.mkdir()
    data = bytearray(random.Random(seed).randbytes(size))
    if changed is not None:
        data[changed * SMALL] ^= 1
    (path / "model.safetensors").write_bytes(data)
    (path / "config.json").write_text("{}")
    (path / "empty.txt").write_text("")
    return path


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


async def relays(tmp_path, count, work):
    """Run work(relays, urls) beside relays that serve each other."""
    made = [WeightRelay(tmp_path / f"node-{number}") for number in range(count)]
    servers = [JsonHttpServer(relay.routes(), host="127.0.0.1", port=0) for relay in made]
    try:
        for server in servers:
            await server.start()
        return await work(made, [server.url for server in servers])
    finally:
        for server in servers:
            await server.close()
        for relay in made:
            await relay.close()


def on_host(server, host):
    """The client of a server of the kit as if it ran on another host:
    127.0.0.0/8 is all this machine."""
    engine = {"vllm": VllmEngine, "sglang": SglangEngine}[server.kind](server.url)
    engine.url = server.url.replace("127.0.0.1", host)
    return engine
