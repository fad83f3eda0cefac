"""A worker process: it joins a run, plays the groups that it is given, and stops by itself when
the run is out of reach."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from turnwright.config import Limits
from turnwright.config.recipe import build
from turnwright.engines import Generation, Request
from turnwright.envs.resolve import resolve_env
from turnwright.envs.spec import EnvSpec
from turnwright.errors import (
    BackendContractError,
    ConfigError,
    EngineError,
    EngineUnavailable,
    TurnwrightError,
    class_name,
    words,
)
from turnwright.media import MediaStore
from turnwright.renderers import load_renderer
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.rollouts import Rollout
from turnwright.rollouts.rollout_settings import RolloutSettings
from turnwright.types import GroupKey, Image, ImageRef
from turnwright_cluster.code import code_of
from turnwright_cluster.codec import (
    Contexts,
    group_row,
    image_hashes,
    placed_hashes,
    read_generation,
    read_spec,
    request_row,
)
from turnwright_cluster.link import RETRY_S, RunLink
from turnwright_cluster.local import EventRouter, StreamWorker

PATIENCE_S = 600.0
"""Seconds for which a run may be out of reach."""
REJOIN_S = 1.0
"""Seconds between attempts to join a run."""
GONE = 410
"""HTTP status for a worker that the run does not know."""
STOP_S = 2.0
"""Seconds that environments with effects get to stop, before the process ends
with what they still do."""
STOPPED = 3
"""Exit status of a process that ended with the effects of its environments."""
FAULTS = {kind.__name__: kind for kind in (EngineUnavailable, BackendContractError)}


class RunEngine:
    """Engine of the run, as its workers reach it."""

    def __init__(
        self, link: RunLink, welcome: Mapping[str, Any], banned_ids: frozenset[int]
    ) -> None:
        self.context: int | None = welcome["context"]
        self._link, self._messages, self._banned = link, welcome["messages"], banned_ids
        self._leases: dict[str, tuple[str, Contexts]] = {}

    def lease(self, group: str, lease: str) -> None:
        """Call for a lease in the sessions of a group."""
        self._leases[group] = lease, Contexts()

    async def generate(self, request: Request) -> Generation:
        if request.media:
            await self._link.send_images(placed_hashes(request))
        lease, contexts = self._leases[request.group]
        found = await self._link.call(
            lease, request_row(request, self._banned, contexts, messages=self._messages)
        )
        if "held" in found:  # the call is made again once it is not
            return Generation([], [], "abort", request.min_version)
        if "fault" in found:
            refused = FAULTS.get(found["fault"], EngineError)(found["message"])
            refused.retry_after = found["retry_after"]
            raise refused
        return read_generation(found)

    def release(self, session: str) -> None:
        """Do nothing: the run ends the sessions of a group together."""

    async def close(self) -> None:
        pass


def environments(welcome: Mapping[str, Any], root: Path) -> dict[str, EnvSpec]:
    """Resolve the environments of the recipe by their names; the tasks come with the groups."""
    play = relocated(welcome["rollout"]["function"], welcome, root)
    own: dict[str, Any] = {"tasks": None, "eval_tasks": None, "columns": {}}
    tables = [relocated(env, welcome, root) | own for env in welcome["env"]]
    # They are read as those of any recipe, since a table has tables of its own (`env.retries`).
    configs = build({"env": tables}, {}).env
    found = [resolve_env(env, play=play) for env in configs] or [resolve_env("", play=play)]
    return {spec.name: spec for spec in found}


def relocated(value: Any, welcome: Mapping[str, Any], root: Path) -> Any:
    """Return a setting with paths in the recipe's directory moved to the
    same place under `root`."""
    if isinstance(value, dict):
        return {name: relocated(item, welcome, root) for name, item in value.items()}
    if isinstance(value, list):
        return [relocated(item, welcome, root) for item in value]
    base = welcome["recipe"]
    if (
        isinstance(value, str)
        and base is not None
        and (value == base or value.startswith(f"{base}/"))
    ):
        return f"{root}{value[len(base) :]}"
    return value


def _renderer(welcome: Mapping[str, Any], folder: Path) -> ChatRenderer:
    source = folder / "model"
    source.mkdir()
    for name, data in welcome["files"].items():
        (source / Path(name).name).write_bytes(base64.b64decode(data))
    model = welcome["model"]
    template = model["template"]
    if welcome["template_file"] is not None:
        template = str(folder / "template.jinja")
        Path(template).write_text(welcome["template_file"], "utf-8")
    control = welcome["rollout"]["control_text"]
    args = {
        "template_args": model["template_args"],
        "parser": model["parser"],
        "control_text": control,
    }
    renderer = load_renderer(source, template=template, **args)
    renderer.ban(welcome["banned"])
    if renderer.fingerprint != welcome["fingerprint"]:
        raise ConfigError(
            "the renderer made of the run's files differs from the run's: install the versions "
            "that it has"
        )
    return renderer


class WorkerProcess:
    """Joins a run as often as it is there, and plays."""

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        room: int = 16,
        root: Path | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """`room` is the number of groups at once; `root` replaces the recipe's directory in
        paths of environments."""
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._link = RunLink(url, self.name)
        self._room, self._note, self._root = room, note, root
        self._patience_s = PATIENCE_S
        self._groups: dict[GroupKey, asyncio.Task[None]] = {}
        self._effects = False
        """Whether a group in play has effects that outlast it."""

    async def run(self, *, patience_s: float = PATIENCE_S) -> None:
        """Play until the run ends; wait up to `patience_s` for a run that cannot be reached.

        Raises:
            TurnwrightError: when the run refuses this worker.
        """
        self._patience_s = patience_s
        try:
            while time.monotonic() - self._link.reached < patience_s:
                try:
                    welcome = await self._link.hello()
                    if await self._serve(welcome):
                        self._note("the run ended")
                        return
                except EngineUnavailable:
                    await asyncio.sleep(REJOIN_S)
        finally:
            await self._link.close()
        raise TurnwrightError(
            f"no run answered at {self._link.url} for {patience_s:g} s; start it, then start this "
            "worker again"
        )

    async def _serve(self, welcome: Mapping[str, Any]) -> bool:
        """Play for a run until it ends (True) or is out of reach (False)."""
        link, base = self._link, welcome["recipe"]
        root = (
            self._root
            or (Path() if base is None or not Path(base).is_dir() else Path(base)).resolve()
        )
        with tempfile.TemporaryDirectory(prefix="turnwright-worker-") as name:
            folder = Path(name)
            renderer, specs = _renderer(welcome, folder), environments(welcome, root)
            self._effects = any(spec.rules.effects for spec in specs.values())
            store = MediaStore(folder / "media")
            link.share(store)
            router = EventRouter(link.durable)
            engine = RunEngine(link, welcome, renderer.banned_ids)
            chosen = ("concurrency", "environments", "stop", "sanity", "sanity_share", "watchdog_s")
            rollout = Rollout(
                engine,
                renderer,
                RolloutSettings(
                    limits=Limits(**welcome["limits"]),
                    seed=welcome["seed"],
                    history=relocated(welcome["rollout"]["history"], welcome, root),
                    **{name: welcome["rollout"][name] for name in chosen},
                ),
                media=store,
                journal=router,
            )
            await link.join(self._room, code_of(env["use"] for env in welcome["env"]))
            self._note(f"{self.name} joined {link.url}")
            async with rollout.stream() as stream:
                worker = StreamWorker(self.name, rollout, stream, router, specs)
                return await self._play_until_end(worker, engine, folder)

    async def _play_until_end(self, worker: StreamWorker, engine: RunEngine, folder: Path) -> bool:
        link = self._link
        running = (self._work(worker, engine, folder), link.report(), link.stay(), self._guard())
        loops = [asyncio.create_task(loop) for loop in running]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            return any([loop.result() for loop in done])
        except EngineError as error:
            if error.status != GONE:
                raise TurnwrightError(f"the run sent this worker away: {error}") from None
            self._note("the run does not know this worker any more: joining again")
            await self._stop_effects()
            return False
        finally:
            for task in (*loops, *self._groups.values()):
                task.cancel()
            await asyncio.gather(*loops, *self._groups.values(), return_exceptions=True)
            self._groups.clear()
            link.held.clear()

    async def _work(self, worker: StreamWorker, engine: RunEngine, folder: Path) -> bool:
        """Take groups until the run ends."""
        link, gate = self._link, worker.gate
        while True:
            try:
                found = await link.work()
            except EngineUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            if found["held"] != gate.held:
                (gate.hold_new if found["held"] else gate.resume)()
            if found["ended"]:
                await self._stop_effects()
            for lease in found["ended"]:
                if task := link.held.pop(lease, None):
                    task.cancel()
            for row in found["groups"]:
                link.held[row["lease"]] = asyncio.create_task(
                    self._play(row["lease"], row["spec"], worker, engine, folder)
                )
            if found["over"]:
                return True

    async def _play(
        self,
        lease: str,
        row: Mapping[str, Any],
        worker: StreamWorker,
        engine: RunEngine,
        folder: Path,
    ) -> None:
        """Play one group and report its end."""

        def image(ref: ImageRef) -> Image:
            return Image(
                folder / "media" / f"{ref.sha256}.png", alt=ref.alt, max_pixels=ref.max_pixels
            )

        link = self._link
        try:
            await link.fetch_images(image_hashes(row))
            spec = read_spec(row, image)
            task = asyncio.current_task()
            assert task is not None
            before, self._groups[spec.group] = self._groups.get(spec.group), task
            if before is not None:  # the run asks again for a group whose lease here ended
                before.cancel()
                await asyncio.wait({before})
            engine.lease("/".join(map(str, spec.group)), lease)
            group = await worker.play(spec, partial(link.event, lease))
            link.answer(lease, group_row(group))
        except Exception as error:
            link.answer(lease, {"fault": f"{class_name(error)}: {words(error)}"})

    async def _guard(self) -> bool:
        """Stop every group when the run was out of reach for as long as a lease lasts: it asks
        others for them then."""
        link = self._link
        while True:
            await asyncio.sleep(link.lease_s / 10)
            silent = time.monotonic() - link.reached
            if silent <= (link.lease_s if link.held else self._patience_s):
                continue  # a run that trains in sync answers nothing meanwhile
            self._note(
                f"the run was out of reach for {silent:.0f} s: stopping what was played for it"
            )
            await self._stop_effects()
            return False

    async def _stop_effects(self) -> None:
        """Stop groups that others may be asked for now; nothing but the end of the process
        ends a call in a thread."""
        tasks = list(self._link.held.values())
        if not (tasks and self._effects):
            return
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_S)
        self._note(
            "this process ends with what its environments do, since others may be asked for it"
        )
        os._exit(STOPPED)
