"""The rollout servers of an episode at a real address of this machine, for user code that
brings its own HTTP client."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from turnwright.errors import EnvError, LimitReached

if TYPE_CHECKING:
    from turnwright_serve.server import Call, JsonHttpServer

LOOPBACK = "127.0.0.1"


class AnswersRequests(Protocol):
    """The engine of an episode."""

    @property
    def model(self) -> Any:
        """The model, with its `tokenizer`."""

    async def answer(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request."""


class RouterPort:
    """A port of this machine that only one episode has, so a request needs nothing
    else to name its episode.

    The port costs a socket. Its HTTP server starts with the first connection: most user code calls
    slime's `post`, which reaches the engine without one.
    """

    def __init__(self, engine: AnswersRequests) -> None:
        self._engine = engine
        self._listener: socket.socket | None = None
        self._serving: asyncio.Task[JsonHttpServer] | None = None

    def open(self) -> int:
        """Listen, and return the port.

        Raises:
            OSError: where this process has used half of the files that it may open; the others are
                for connections and data.
        """
        listener = socket.create_server((LOOPBACK, 0), backlog=128)
        if listener.fileno() > _most_files() // 2:
            listener.close()
            raise OSError(errno.EMFILE, "half of the files that this process may open are in use")
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(self._listener, self._on_connection)
        return int(self._listener.getsockname()[1])

    def _on_connection(self) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> JsonHttpServer:
        from turnwright_serve.server import Endpoint, JsonHttpServer

        assert self._listener is not None
        routes = {
            ("POST", "/generate"): Endpoint(self._generate, bytes),
            ("GET", "/health"): Endpoint(_healthy),
            ("GET", "/health_generate"): Endpoint(_healthy),
            ("GET", "/model_info"): Endpoint(self._describe),
            ("GET", "/get_model_info"): Endpoint(self._describe),
        }
        # The port is the episode's key: every client that knows it may ask, as with slime's router.
        server = JsonHttpServer(routes, host=LOOPBACK, port=0, token=None, listener=self._listener)
        await server.start()
        return server

    async def _generate(self, call: Call) -> Any:
        from turnwright_serve.server import HttpError

        try:
            body = orjson.loads(call.body)
        except orjson.JSONDecodeError as error:
            raise HttpError(400, f"/generate: the body is no JSON ({error})") from None
        if not isinstance(body, Mapping):
            raise HttpError(400, "/generate: the body is no object")
        if body.get("stream"):
            raise HttpError(
                400, "/generate: stream is not supported here; send a request without it"
            )

        try:
            return await self._engine.answer("/generate", body)
        except (EnvError, LimitReached, ValueError) as error:
            raise HttpError(400, str(error)) from error

    async def _describe(self, call: Call) -> Any:
        name = self._engine.model.tokenizer.name_or_path
        return {"model_path": name, "tokenizer_path": name, "is_generation": True}

    async def close(self) -> None:
        """Close the port, and every connection."""
        if self._listener is None:
            return
        if self._serving is None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        else:
            await (await self._serving).close()
        self._listener = None


def _most_files() -> int:
    """Return how many files this process may open."""
    if sys.platform == "win32":
        return 1 << 13
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def _healthy(call: Call) -> Any:
    return {}
