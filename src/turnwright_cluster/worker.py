"""A worker process: it joins a run, plays the groups that it is given, and stops by itself when the
run is out of reach.

`WorkerProcess.run` joins as often as the run is there; `_serve` makes renderer, environments and
rollout of what the run says of itself, and `_work` takes groups. Its engine calls go to the run's
engine (`RunEngine`), and what is reported goes through a `RunLink`.
"""

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
"""Seconds that environments with effects get to stop, before the process ends with what they still
do."""
STOPPED = 3
"""Exit status of a process that ended with the effects of its environments."""
FAULTS = {kind.__name__: kind for kind in (EngineUnavailable, BackendContractError)}


class RunEngine:
    """Engine of the run, as its workers reach it."""

    gives_alternatives = True
    """The run has refused an engine that does not."""

    def __init__(
        self, link: RunLink, welcome: Mapping[str, Any], banned_ids: frozenset[int]
    ) -> None:
        self.context: int | None = welcome["context"]
        self._link = link
        self._messages = welcome["messages"]
        self._banned = banned_ids
        self._leases: dict[str, tuple[str, Contexts]] = {}

    def lease(self, group: str, lease: str) -> None:
        """Call for a lease in the sessions of a group."""
        self._leases[group] = lease, Contexts()

    async def generate(self, request: Request) -> Generation:
        if request.media:
            await self._link.send_images(placed_hashes(request))
        lease, contexts = self._leases[request.group]
        row = request_row(request, self._banned, contexts, messages=self._messages)
        reply = await self._link.call(lease, row)
        if "held" in reply:
            # The call is made again once it is not.
            return Generation([], [], "abort", request.min_version)
        if "fault" in reply:
            refused = FAULTS.get(reply["fault"], EngineError)(reply["message"])
            refused.retry_after = reply["retry_after"]
            raise refused
        return read_generation(reply)

    def release(self, session: str) -> None:
        """Do nothing: the run ends the sessions of a group together."""

    async def close(self) -> None:
        pass


def environments(welcome: Mapping[str, Any], root: Path) -> dict[str, EnvSpec]:
    """Resolve the environments of the recipe by their names; the tasks come with the groups."""
    play = relocated(welcome["rollout"]["function"], welcome, root)
    without_tasks: dict[str, Any] = {"tasks": None, "eval_tasks": None, "columns": {}}
    tables = [relocated(env, welcome, root) | without_tasks for env in welcome["env"]]
    # They are read as those of any recipe, since a table has tables of its own (`env.retries`).
    configs = build({"env": tables}, {}).env
    specs = [resolve_env(env, play=play) for env in configs] or [resolve_env("", play=play)]
    return {spec.name: spec for spec in specs}


def relocated(value: Any, welcome: Mapping[str, Any], root: Path) -> Any:
    """Return a setting with paths in the recipe's directory moved to the same place under
    `root`."""
    if isinstance(value, dict):
        return {name: relocated(item, welcome, root) for name, item in value.items()}
    if isinstance(value, list):
        return [relocated(item, welcome, root) for item in value]
    base = welcome["recipe"]
    if not isinstance(value, str) or base is None:
        return value
    if value == base or value.startswith(f"{base}/"):
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
    renderer = load_renderer(
        source,
        template=template,
        template_args=model["template_args"],
        parser=model["parser"],
        control_text=welcome["rollout"]["control_text"],
    )
    renderer.ban(welcome["banned"])
    if renderer.fingerprint != welcome["fingerprint"]:
        raise ConfigError(
            "the renderer made of the run's files differs from the run's: install the versions "
            "that it has"
        )
    return renderer


def _recipe_directory(welcome: Mapping[str, Any]) -> Path:
    """Return the directory of the recipe if it is here too, else the current one."""
    recipe = welcome["recipe"]
    return Path(recipe) if recipe is not None and Path(recipe).is_dir() else Path()


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
        """`room` is the number of groups at once; `root` replaces the recipe's directory in paths
        of environments."""
        self.name = name or f"{socket.gethostname()}-{os.getpid()}"
        self._link = RunLink(url, self.name)
        self._room = room
        self._note = note
        self._root = root
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
        link = self._link
        root = self._root or _recipe_directory(welcome).resolve()
        with tempfile.TemporaryDirectory(prefix="turnwright-worker-") as name:
            folder = Path(name)
            renderer = _renderer(welcome, folder)
            specs = environments(welcome, root)
            self._effects = any(spec.rules.effects for spec in specs.values())
            store = MediaStore(folder / "media")
            link.share(store)
            router = EventRouter(link.durable)
            engine = RunEngine(link, welcome, renderer.banned_ids)
            keys = (
                *("concurrency", "environments", "stop", "alternatives"),
                *("sanity", "sanity_share", "watchdog_s"),
            )
            rollout = Rollout(
                engine,
                renderer,
                RolloutSettings(
                    limits=Limits(**welcome["limits"]),
                    seed=welcome["seed"],
                    history=relocated(welcome["rollout"]["history"], welcome, root),
                    **{key: welcome["rollout"][key] for key in keys},
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
        """Take groups, report, stay and watch, until one of these ends."""
        link = self._link
        loops = [
            asyncio.create_task(self._work(worker, engine, folder)),
            asyncio.create_task(link.report()),
            asyncio.create_task(link.stay()),
            asyncio.create_task(self._guard()),
        ]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            # Each result is looked at, since it may be an error.
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
        link = self._link
        gate = worker.gate
        while True:
            try:
                news = await link.work()
            except EngineUnavailable:
                await asyncio.sleep(RETRY_S)
                continue

            if news["held"] and not gate.held:
                gate.hold_new()
            elif gate.held and not news["held"]:
                gate.resume()

            if news["ended"]:
                await self._stop_effects()
            for lease in news["ended"]:
                task = link.held.pop(lease, None)
                if task is not None:
                    task.cancel()
            for row in news["groups"]:
                playing = self._play(row["lease"], row["spec"], worker, engine, folder)
                link.held[row["lease"]] = asyncio.create_task(playing)
            if news["over"]:
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
            path = folder / "media" / f"{ref.sha256}.png"
            return Image(path, alt=ref.alt, max_pixels=ref.max_pixels)

        link = self._link
        try:
            await link.fetch_images(image_hashes(row))
            spec = read_spec(row, image)
            task = asyncio.current_task()
            assert task is not None
            before = self._groups.get(spec.group)
            self._groups[spec.group] = task
            if before is not None:
                # The run asks again for a group whose lease here ended.
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
            # A run that trains in sync answers nothing meanwhile.
            patience_s = link.lease_s if link.held else self._patience_s
            if silent <= patience_s:
                continue
            self._note(
                f"the run was out of reach for {silent:.0f} s: stopping what was played for it"
            )
            await self._stop_effects()
            return False

    async def _stop_effects(self) -> None:
        """Stop groups that others may be asked for now; nothing but the end of the process ends a
        call in a thread."""
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
