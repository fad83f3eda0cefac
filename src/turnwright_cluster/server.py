"""The run's side of its workers: a server that they join, also through a NAT, and ask for groups,
replies and images.

`RunServer.open` has the routes; each handler is below, first those of who is there, then those of
what a worker asks for and sends. What a worker has and lacks is kept by `RemoteWorker`, groups are
placed by `WorkerPool`. The worker's end is `RunLink`.

A worker is lost when its connection breaks and it does not return within `RECONNECT_S`, or when its
lease ends without a word. Everything that it sends is JSON.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from turnwright.config import RunConfig
from turnwright.engines import (
    Generation,
    HasContextLimit,
    Request,
    SupportsWeightUpdate,
    check_generation,
    tokens,
)
from turnwright.errors import ConfigError, EngineError, MediaError, class_name, words
from turnwright.records.run_dir import EventLog
from turnwright.rollouts import Rollout
from turnwright.rollouts.timeouts import CallGate
from turnwright.types import Image, ImageRef
from turnwright_cluster.base import GroupSpec, WorkerLost
from turnwright_cluster.code import difference
from turnwright_cluster.codec import generation_row, read_request, spec_row
from turnwright_cluster.remote import Lease, RemoteWorker
from turnwright_serve.server import Call, Endpoint, HttpError, JsonHttpServer

TOKEN_VARIABLE = "TURNWRIGHT_WORKER_TOKEN"
"""Environment variable with the token that workers must send."""
TOKEN_FILE = "worker_token"
"""File of the run directory with a token that the run generated."""
WORKER = "x-turnwright-worker"
"""Header with the id that a worker got when it joined."""
RECONNECT_S = 1.0
"""Seconds in which a worker whose connection broke must return."""
ANYWHERE = "0.0.0.0:0"
"""Address for the workers of a Ray cluster, if none is given."""
CLOSE_S = 0.3
"""Seconds to inform workers that the run ended."""
MAX_FILES = 256 * 2**20
"""Maximum bytes of a model directory without its weights."""
ENTRIES = {"event": [dict], "answer": [dict], "cancel": [int], "call": [int, dict]}
"""Types of an entry of a report, after its kind and its lease."""
_HASH = re.compile("[0-9a-f]{64}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


class RunServer:
    """Server that workers join."""

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        source: Path,
        *,
        journal: EventLog,
        recipe: Path | None,
        code: Callable[[], Mapping[str, str]],
        on_join: Callable[[RemoteWorker], None],
        on_change: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """`source` is the directory of tokenizer and template, `recipe` that of the recipe, to
        which paths may be relative.

        `on_join` receives each worker, `on_change` is called when one has more room or is gone.
        """
        host, _, port = (config.scale.listen or ANYWHERE).rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._config = config
        self._run = run
        self._source = source
        self._recipe = recipe
        self._code = code
        self._journal = journal
        self._on_join = on_join
        self._on_change = on_change
        self._note = note

        # The user's token, or one of the run's own, which a resumed run has already.
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._generated = not token
        if self._generated:
            file = run / TOKEN_FILE
            token = file.read_text() if file.is_file() else secrets.token_urlsafe(24)
        self.token = token
        self.workers: dict[str, RemoteWorker] = {}
        """Workers by id, also those that are gone."""
        self._checks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self, rollout: Rollout, gate: CallGate) -> Any:
        """Serve for a stream; `ConfigError` when the address is not available."""
        self._rollout = rollout
        self._gate = gate
        gate.watch(self._wake)
        engine = rollout.engine
        self._context = engine if isinstance(engine, HasContextLimit) else None
        self._messages = not isinstance(engine, SupportsWeightUpdate)
        routes = {
            ("POST", "/hello"): Endpoint(self._welcome, bytes),
            ("POST", "/join"): Endpoint(self._join, bytes),
            ("POST", "/alive"): Endpoint(self._as_worker(self._alive), bytes),
            ("POST", "/work"): Endpoint(self._as_worker(self._work), bytes),
            ("POST", "/report"): Endpoint(self._as_worker(self._report), bytes, changes=True),
            ("POST", "/image"): Endpoint(self._as_worker(self._put_image), bytes, changes=True),
            ("POST", "/images"): Endpoint(self._as_worker(self._images), bytes),
            ("POST", "/leave"): Endpoint(self._as_worker(self._leave), bytes, changes=True),
        }
        server = JsonHttpServer(routes, host=self._host, port=self._port, token=self.token)
        try:
            await server.start()
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"scale.listen = {self._config.scale.listen}: not available ({error}); choose "
                "another port, or 0 for a free one"
            ) from None

        port = server.port
        self._port = port
        self.url = self.url_at(socket.gethostname())
        if self._generated:
            self._write_token(port)
        watch = asyncio.create_task(self._watch())
        where = f"token of {TOKEN_VARIABLE}"
        if self._generated:
            where = f"token in {self._run / TOKEN_FILE}"
        self._note(f"workers join with: turnwright worker --join {self.url} ({where})")
        try:
            yield self
            for worker in self.workers.values():
                await worker.close()
            # Open requests for work are answered meanwhile: the run ended.
            await asyncio.sleep(CLOSE_S)
        finally:
            watch.cancel()
            if self._generated:
                tokens.withdraw(port, self.token)
            await server.close()
            await asyncio.gather(watch, *self._checks, return_exceptions=True)

    def url_at(self, host: str) -> str:
        """Return the URL for workers that reach this machine as `host`, unless the server has one
        address only."""
        if self._host not in ("0.0.0.0", "::"):
            host = self._host
        if ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self._port}"

    def _write_token(self, port: int) -> None:
        """Write the token where this user's workers find it, and into the run directory, for
        others to be given it."""
        tokens.publish(port, self.token)
        path = self._run / TOKEN_FILE
        if path.exists():
            return  # the run was resumed: its workers have the token already
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.token)

    # Who is there

    def _as_worker(
        self, handler: Callable[[RemoteWorker, Any], Awaitable[Any]]
    ) -> Callable[[Call], Awaitable[Any]]:
        """Return a handler that finds the worker and reads the body."""

        async def answer(call: Call) -> Any:
            worker = self.workers.get(call.headers.get(WORKER, ""))
            if worker is None:
                raise HttpError(
                    410,
                    "the run does not know this worker (it may have been restarted): join again",
                )
            if worker.gone:
                raise HttpError(410, f"the run takes nothing from {worker.name}: {worker.gone}")
            worker.seen = time.monotonic()
            try:
                body = orjson.loads(call.body) if call.body else {}
            except ValueError as error:
                raise HttpError(400, f"{len(call.body)} bytes are not JSON ({error})") from None
            if not isinstance(body, dict):
                raise HttpError(400, "the JSON is no object")
            return await handler(worker, body)

        return answer

    def _wake(self) -> None:
        for worker in self.workers.values():
            worker.wake()

    def lose(self, worker: RemoteWorker, why: str) -> None:
        """End the leases of a worker that is not there any more."""
        if not worker.gone:
            worker.fail(WorkerLost(why))
            self._on_change()

    def lose_named(self, name: str, why: str) -> None:
        """End the leases of the workers of a name."""
        for worker in self.workers.values():
            if worker.name == name:
                self.lose(worker, why)

    async def _watch(self) -> None:
        """Lose workers whose lease ended; what was late because this process was busy does not
        count."""
        lease = self._config.scale.lease_s
        pause = min(lease / 4, 0.5)
        # Until `extra` nobody is lost.
        extra = 0.0
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if now - began > 2 * pause:
                extra = now + lease
            for worker in list(self.workers.values()):
                silent = now - worker.seen
                if not worker.gone and now > extra and silent > lease:
                    self.lose(
                        worker, f"it sent nothing for {silent:.1f} s (scale.lease_s = {lease:g})"
                    )

    async def _check_return(self, worker: RemoteWorker) -> None:
        await asyncio.sleep(RECONNECT_S)
        if not worker.connections:
            self.lose(
                worker, f"its connection broke, and it did not return within {RECONNECT_S:g} s"
            )

    async def _join(self, call: Call) -> Any:
        try:
            row = orjson.loads(call.body)
            name = str(row["name"])[:100]
            room = int(row["room"])
            code = dict(row["code"])
        except (ValueError, KeyError, TypeError):
            raise HttpError(400, "joining needs name, room and code") from None
        name = "".join(character if character.isprintable() else "?" for character in name)
        differing = difference(self._code(), code)
        if differing:
            self._note(f"worker {name} may not join: its code differs from the run's ({differing})")
            raise HttpError(
                403,
                f"the code of this worker differs from the run's: {differing}; install the same "
                "version here",
            )

        worker = RemoteWorker(
            name,
            max(room, 1),
            row=self._row,
            release=self._rollout.engine.release,
            is_held=lambda: self._gate.held,
        )
        self.lose_named(name, "a worker of its name joined")
        self.workers[worker.id] = worker
        self._on_join(worker)
        return {"id": worker.id, "lease_s": self._config.scale.lease_s}

    def _row(self, spec: GroupSpec) -> Mapping[str, Any]:
        return spec_row(spec, self._rollout.media_intake.store)

    async def _welcome(self, call: Call) -> dict[str, Any]:
        """Return what a worker needs to know of the run."""
        renderer = self._rollout.renderer
        config = self._config
        template = config.model.template
        template_text = None
        if template is not None and Path(template).is_file():
            template_text = Path(template).read_text("utf-8")
        return {
            "seed": config.seed,
            "model": {
                "template": template,
                "template_args": config.model.template_args,
                "parser": config.model.parser,
            },
            "template_file": template_text,
            "env": [asdict(env) for env in config.env],
            "rollout": asdict(config.rollout),
            "limits": asdict(config.limits),
            "recipe": None if self._recipe is None else str(self._recipe),
            "files": self._model_files(),
            "banned": sorted(renderer.banned_ids),
            "fingerprint": renderer.fingerprint,
            "context": None if self._context is None else self._context.context,
            "messages": self._messages,
        }

    def _model_files(self) -> dict[str, str]:
        """Return the files of the model directory but its weights, in base64, by name."""
        files: dict[str, str] = {}
        size = 0
        for path in sorted(self._source.iterdir()):
            is_weights = path.name.endswith((*_WEIGHTS, ".index.json"))
            if path.is_file() and not is_weights:
                data = path.read_bytes()
                files[path.name] = base64.b64encode(data).decode()
                size += len(data)
        if size > MAX_FILES:
            raise HttpError(
                500,
                f"{self._source} has {size:,} bytes besides weights, and workers are sent at most "
                f"{MAX_FILES:,}",
            )
        return files

    async def _leave(self, worker: RemoteWorker, body: Mapping[str, Any]) -> Any:
        self.lose(worker, "it left")
        return {}

    # What a worker asks for and sends

    async def _alive(self, worker: RemoteWorker, body: Mapping[str, Any]) -> Any:
        """Hold a request, whose connection breaks with the worker's process; even a busy worker
        has one nearly always."""
        with worker.connected():
            try:
                await asyncio.sleep(self._config.scale.lease_s / 3)
            except asyncio.CancelledError:
                # Its connection broke.
                check = asyncio.create_task(self._check_return(worker))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)
                raise
        return {}

    async def _work(self, worker: RemoteWorker, body: Mapping[str, Any]) -> Any:
        held = _typed_list(body.get("held"), str)
        got = _typed_list(body.get("got"), int)
        return await worker.work(set(held), got, self._config.scale.lease_s / 3)

    async def _report(self, worker: RemoteWorker, body: Mapping[str, Any]) -> Any:
        """Take events and answers, each report once."""
        async with worker.reporting:
            if body.get("number") not in (worker.reported, worker.reported + 1):
                raise HttpError(
                    400, f"report {body.get('number')!r:.20} came after report {worker.reported}"
                )
            # Otherwise it was taken, and its answer was lost.
            if body["number"] > worker.reported:
                for entry in _typed_list(body.get("entries"), list):
                    self._take(worker, entry)
                worker.reported += 1
            if body.get("durable"):
                await self._journal.durable()
        return {}

    def _take(self, worker: RemoteWorker, entry: list[Any]) -> None:
        """Take one entry of a report: an event, an answer, a call, or the end of a call."""
        kind, lease, *rest = (*entry, None, None, None)[: max(len(entry), 3)]
        if not isinstance(lease, str) or [type(value) for value in rest] != ENTRIES.get(str(kind)):
            raise HttpError(400, f"{entry!r:.80} is no entry of a report")

        held = worker.leases.get(lease)
        if kind == "answer":
            worker.answered(lease, rest[0])
        elif kind == "cancel":
            worker.cancel(rest[0])
        elif held is not None and not held.answer.done():
            if kind == "event":
                worker.take(held, rest[0])
            else:
                self._begin_call(worker, held, rest[0], rest[1])
        elif kind == "call":
            worker.refuse(rest[0], "this group is not asked for any more")

    def _begin_call(
        self, worker: RemoteWorker, lease: Lease, number: int, row: Mapping[str, Any]
    ) -> None:
        renderer = self._rollout.renderer
        try:
            request = read_request(row, renderer.decode, renderer.banned_ids, lease.contexts)
        except (KeyError, TypeError, ValueError) as error:
            raise HttpError(400, f"an engine call cannot be read ({error!r:.200})") from error
        worker.call(number, lease, request.session, self._reply(request, lease))

    async def _reply(self, request: Request, lease: Lease) -> Mapping[str, Any]:
        """Return the reply to a call, or that the calls of training are held: the worker's clocks
        must not run meanwhile."""
        if lease.spec.training and self._gate.held:
            return {"held": True}
        try:
            generation = await self._call_engine(request, lease.spec)
        except (EngineError, TimeoutError) as error:
            after = error.retry_after if isinstance(error, EngineError) else None
            return {"fault": type(error).__name__, "message": str(error), "retry_after": after}
        return generation_row(generation)

    async def _call_engine(self, request: Request, spec: GroupSpec) -> Generation:
        gate = self._gate
        engine = self._rollout.engine
        if not gate.try_enter(spec.training):
            await gate.enter(spec.training, request.min_version, request.call)
        try:
            generation = await engine.generate(request)
        except (EngineError, TimeoutError):
            raise
        except Exception as error:
            raise EngineError(
                f"{type(engine).__name__}: {class_name(error)}: {words(error)}"
            ) from error
        finally:
            gate.leave(spec.training)
        check_generation(generation, request, type(engine).__name__)
        return generation

    async def _put_image(self, worker: RemoteWorker, body: Mapping[str, Any]) -> Any:
        """Take an image that an environment made."""
        store = self._rollout.media_intake.store
        try:
            data = base64.b64decode(body["png"], validate=True)
            ref = await asyncio.to_thread(store.put, Image(data))
        except (KeyError, TypeError, ValueError, MediaError) as error:
            raise HttpError(400, f"an image cannot be read ({error})") from None
        if not isinstance(ref, ImageRef) or ref.sha256 != body.get("sha256"):
            raise HttpError(400, "an image came under the hash of another")
        return {}

    async def _images(self, worker: RemoteWorker, body: Mapping[str, Any]) -> Any:
        """Return images, by their hashes."""
        store = self._rollout.media_intake.store
        hashes = _typed_list(body.get("sha256"), str)
        if not all(map(_HASH.fullmatch, hashes)):
            raise HttpError(400, "images are asked for by their hashes")
        try:
            return {
                name: base64.b64encode(store.png_bytes(ImageRef(name))).decode() for name in hashes
            }
        except MediaError as error:
            raise HttpError(404, str(error)) from None


def _typed_list(value: Any, kind: type) -> list[Any]:
    """Return a list of values of one type; raise `HttpError` for anything else."""
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise HttpError(400, f"{value!r:.80} is no list of {kind.__name__}")
    return value
