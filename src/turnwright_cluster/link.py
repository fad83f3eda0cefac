"""Connection of a worker to its run: `RunLink`.

A worker holds three requests at a time: `stay`, whose connection tells the run that the process is
there; `work`, which waits for what is new at the run; and `report`, which sends what is new here.
Their other end is `RunServer`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from itertools import accumulate, takewhile
from typing import Any

import orjson

from turnwright.engines.remote.http import HttpClient
from turnwright.errors import EngineError, EngineUnavailable, TurnwrightError
from turnwright.media import MediaStore
from turnwright.records import to_json
from turnwright.records.serialization import Event
from turnwright.types import Image, ImageRef
from turnwright_cluster.codec import dumps, image_hashes
from turnwright_cluster.server import TOKEN_VARIABLE, WORKER

RETRY_S = 0.2
"""Seconds between attempts to repeat a request."""
MAX_REPORT = 16 * 2**20
"""Bytes after which a report is sent; what is left goes into the next."""


class RunLink:
    """Connection to a run: a request that reports what is new here, and one that waits for what is
    new there."""

    def __init__(self, url: str, name: str) -> None:
        """Raises `ConfigError` for an invalid URL, or without `aiohttp`."""
        key_env = TOKEN_VARIABLE if os.environ.get(TOKEN_VARIABLE) else None
        self._client = HttpClient(url, key_env=key_env, most=8)
        self.url = url
        self.name = name
        self._id: Mapping[str, str] = {}
        self.lease_s = 0.0
        self.reached = time.monotonic()
        """Time at which the last request that was answered was sent."""
        self.held: dict[str, asyncio.Task[None]] = {}
        """Groups by lease, until their answer was taken."""
        self._entries: list[tuple[str, str, bytes]] = []
        """Kind, lease and JSON of what is to be reported."""
        self._reports = 0
        self._added = 0
        """Number of entries so far; `_durable` of them are on the run's disk, and somebody waits
        for the first `_wants_durable`."""
        self._durable = 0
        self._wants_durable = 0
        self._news = asyncio.Event()
        self._done = asyncio.Condition()
        self._calls = 0
        self._replies: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        """Engine calls in flight by number."""
        self._got: list[int] = []
        self._store: MediaStore | None = None
        self._sent: set[str] = set()
        """Images that the run has."""
        self._sending = asyncio.Lock()

    def share(self, store: MediaStore) -> None:
        """Exchange the images of a store with the run."""
        self._store = store

    async def hello(self) -> dict[str, Any]:
        """Return what a worker needs to know of the run; errors as of `join`."""
        return await self._first("/hello", {})

    async def join(self, room: int, code: Mapping[str, str]) -> None:
        """Join the run; raise `EngineUnavailable` while it cannot be reached, and `TurnwrightError`
        when it refuses."""
        joined = await self._first("/join", {"name": self.name, "room": room, "code": code})
        self._id = {WORKER: joined["id"]}
        self.lease_s = joined["lease_s"]
        self._entries = []
        self._reports = 0
        self._got = []
        self._sent = set()

    async def _first(self, path: str, body: Any) -> dict[str, Any]:
        sent = time.monotonic()
        try:
            answer: dict[str, Any] = await self._client.post(path, body, 60.0)
        except EngineUnavailable:
            raise
        except EngineError as error:
            token = f"; set {TOKEN_VARIABLE} to the token of the run" if error.status == 401 else ""
            raise TurnwrightError(f"{error}{token}") from None
        self.reached = sent
        return answer

    async def ask(self, path: str, body: Any, seconds: float) -> Any:
        """Send a request; errors as of `HttpClient.post`."""
        sent = time.monotonic()
        answer = await self._client.post(path, body, seconds, self._id)
        self.reached = max(self.reached, sent)
        return answer

    async def stay(self) -> bool:
        """Hold a request at the run, which notices when this process ends."""
        while True:
            await self._until_answered("/alive", {}, self.lease_s)

    # What is new there

    async def work(self) -> dict[str, Any]:
        """Return what is new at the run: groups, ended leases, and whether its engine is held;
        replies go to their calls."""
        here = {"held": list(self.held), "got": self._got}
        news: dict[str, Any] = await self.ask("/work", here, self.lease_s)
        self._got = [number for number, _ in news["replies"]]
        for number, reply in news["replies"]:
            future = self._replies.pop(number, None)
            if future is not None and not future.done():
                future.set_result(reply)
        return news

    async def call(self, lease: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the reply to an engine call."""
        self._calls += 1
        number = self._calls
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        self._add("call", lease, b"%d,%s" % (number, dumps(row)))
        try:
            return await future
        except asyncio.CancelledError:
            if self._replies.pop(number, None) is not None:
                self._add("cancel", lease, b"%d" % number)
            raise

    # What is new here

    def event(self, lease: str, event: Event) -> None:
        """Report an event."""
        self._add("event", lease, to_json(event))

    def answer(self, lease: str, row: Mapping[str, Any]) -> None:
        """Report the end of a group."""
        self._add("answer", lease, dumps(row))

    def _add(self, kind: str, lease: str, row: bytes) -> None:
        self._entries.append((kind, lease, row))
        self._added += 1
        self._news.set()

    async def durable(self) -> None:
        """Return when the run has what was reported so far, on its disk."""
        async with self._done:
            number = self._added
            self._wants_durable = max(self._wants_durable, number)
            self._news.set()
            await self._done.wait_for(lambda: self._durable >= number)

    async def report(self) -> bool:
        """Send reports until the run refuses one, which is raised."""
        while True:
            await self._news.wait()
            entries = self._next_entries()
            number = self._added - len(self._entries)
            durable = self._wants_durable > self._durable
            self._reports += 1

            # The run must have an image when it reads the event that refers to it.
            if self._store is not None and self._store.encoded:
                for kind, _, row in entries:
                    if kind == "event":
                        await self.send_images(image_hashes(orjson.loads(row)))
            rows = [
                orjson.Fragment(b'["%s","%s",%s]' % (kind.encode(), lease.encode(), row))
                for kind, lease, row in entries
            ]
            body = {"number": self._reports, "entries": rows, "durable": durable}
            await self._until_answered("/report", body, max(self.lease_s, 30.0))

            for kind, lease, _ in entries:
                if kind == "answer":
                    self.held.pop(lease, None)
            async with self._done:
                if durable:
                    self._durable = number
                self._done.notify_all()

    def _next_entries(self) -> list[tuple[str, str, bytes]]:
        """Take the entries of the next report: at least one, else up to `MAX_REPORT`."""
        sizes = accumulate(len(row) for _, _, row in self._entries)
        count = 1 + sum(1 for _ in takewhile(lambda size: size < MAX_REPORT, sizes))
        entries = self._entries[:count]
        self._entries = self._entries[count:]
        if not self._entries:
            self._news.clear()
        return entries

    async def _until_answered(self, path: str, body: Mapping[str, Any], seconds: float) -> None:
        """Repeat a request, each within some seconds, until the run answers or refuses it."""
        while True:
            try:
                await self.ask(path, body, seconds)
                return
            except EngineUnavailable:
                await asyncio.sleep(RETRY_S)

    async def send_images(self, hashes: Iterable[str]) -> None:
        """Send images that the run does not have, each once."""
        assert self._store is not None
        async with self._sending:
            for name in dict.fromkeys(hashes):
                if name in self._sent:
                    continue
                png = base64.b64encode(self._store.png_bytes(ImageRef(name))).decode()
                await self.ask("/image", {"sha256": name, "png": png}, 60.0)
                self._sent.add(name)

    async def fetch_images(self, hashes: Iterable[str]) -> None:
        """Fetch images that are missing here, each once."""
        assert self._store is not None
        missing = [name for name in dict.fromkeys(hashes) if name not in self._sent]
        if missing:
            images = await self.ask("/images", {"sha256": missing}, 60.0)
            for png in images.values():
                await asyncio.to_thread(self._store.put, Image(base64.b64decode(png)))
            self._sent.update(missing)

    async def close(self) -> None:
        """Leave the run, and close the connections."""
        with contextlib.suppress(TurnwrightError):
            await self.ask("/leave", {}, 2.0)
        await self._client.close()
