"""Recording without a run: programs come to a port, and each session of theirs is an episode.

`record_sessions` serves the port; `RecordedSessions` finds the session of a request, plays an
episode for each, and ends those that are ended, idle or closed. A session's requests are answered
by a `ProxySession`, as in a run.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from turnwright.engines import tokens
from turnwright.envs.env import Scores
from turnwright.errors import ConfigError
from turnwright.rollouts.agent_function import Model
from turnwright.rollouts.episode_spec import EpisodeSpec
from turnwright.rollouts.runner import Rollout
from turnwright.rollouts.stream import RolloutStream
from turnwright.types import EpisodeKey, StopReason, Task, Trajectory
from turnwright_serve.proxy.server import ProxyServer
from turnwright_serve.proxy.session import ProxySession, ProxySettings
from turnwright_serve.proxy.wire import RequestFault

PHASE = "record"
"""Phase of recorded episodes."""
_NAME = re.compile(r"[\w.-]{1,100}")
_SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "x-session-id")
"""Headers in which Claude Code, Codex and OpenCode name a run of theirs."""
_PARENT_HEADER = "x-parent-session-id"
"""Header in which a sub-agent of OpenCode names the session that started it."""


@dataclass(slots=True)
class _Open:
    """A session that is being recorded."""

    ready: asyncio.Future[ProxySession]
    used: float
    """`time.monotonic()` of its last request."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    reward: float | None = None


class RecordedSessions:
    """Sessions that begin with their first request and end when they are ended, idle or closed.

    A session is named by its path (`/s/NAME/v1/...`), else by the program's own session header,
    else by its API key, of which only a digest is recorded.
    """

    def __init__(
        self,
        stream: RolloutStream,
        *,
        idle_s: float,
        note: Callable[[str], None],
        settings: ProxySettings,
    ) -> None:
        self._stream = stream
        self._idle_s = idle_s
        self._note = note
        self._settings = settings
        self._open: dict[str, _Open] = {}
        self._numbers: Counter[str] = Counter()
        """How many sessions of each name began."""
        self._roots: dict[str, str] = {}
        """Sessions of OpenCode's sub-agents, and the session that each belongs to."""
        self._playing: set[asyncio.Task[list[Trajectory]]] = set()
        self.trajectories: list[Trajectory] = []
        """Finished episodes."""

    def name_of(self, path: str, headers: Mapping[str, str], key: str) -> str:
        """Return the name of a request's session.

        Raises:
            RequestFault: for a name in the path that is not one.
        """
        if path:
            if _NAME.fullmatch(path) is None:
                raise RequestFault(
                    "a session's name has at most 100 letters, digits, dots, dashes and "
                    "underscores",
                    404,
                )
            return path

        named = next((headers[name] for name in _SESSION_HEADERS if headers.get(name)), "")
        if named:
            parent = headers.get(_PARENT_HEADER, "")
            root = self._roots.setdefault(named, self._roots.get(parent, parent) or named)
            return root if _NAME.fullmatch(root) else _digest("session", root)
        return _digest("key", key) if key else "session"

    async def session(self, name: str) -> ProxySession:
        """Return the session of a name; begin one if none is open."""
        recording = self._open.get(name)
        if recording is None or recording.over.is_set():
            recording = _Open(asyncio.get_running_loop().create_future(), time.monotonic())
            self._open[name] = recording
            self._begin(name, recording)
        recording.used = time.monotonic()
        return await asyncio.shield(recording.ready)

    def end(self, name: str, reward: float | None) -> None:
        """End a session, with its reward.

        Raises:
            RequestFault: if none of that name is open.
        """
        recording = self._open.get(name)
        if recording is None or recording.over.is_set():
            raise RequestFault(f"no open session {name!r:.120}", 404)
        recording.reward = reward
        recording.over.set()

    async def close(self) -> None:
        """End all sessions, and wait until they are recorded."""
        for recording in self._open.values():
            recording.over.set()
        await asyncio.gather(*self._playing, return_exceptions=True)

    def _begin(self, name: str, recording: _Open) -> None:
        number = self._numbers[name]
        self._numbers[name] += 1

        async def play(task: Task, model: Model) -> Scores:
            session = ProxySession(model, self._settings)
            recording.ready.set_result(session)
            try:
                await self._until_over(session, recording)
            finally:
                recording.over.set()
                await session.end()
            if session.error is not None:
                raise session.error
            if session.limit is None:
                return Scores(recording.reward, status="completed")
            return Scores(recording.reward, status=StopReason(session.limit.reason))

        async def record() -> list[Trajectory]:
            key = EpisodeKey(PHASE, 0, name, number)
            episode = EpisodeSpec(Task(name, id=name), key, play=play)
            played = await self._stream.submit([episode])
            self.trajectories += played
            for trajectory in played:
                self._note(_line(trajectory))
            return played

        task = asyncio.ensure_future(record())
        self._playing.add(task)

        def finished(done: asyncio.Task[list[Trajectory]]) -> None:
            self._playing.discard(done)
            error = None if done.cancelled() else done.exception()
            if not recording.ready.done():
                reason = error or "the recorder is closed"
                fault = RequestFault(f"the session could not begin: {reason}")
                recording.ready.set_exception(fault)
            elif error is not None:
                self._note(f"{name}: {error}")

        task.add_done_callback(finished)

    async def _until_over(self, session: ProxySession, recording: _Open) -> None:
        """Wait until a session is ended, by a request, a limit or its silence."""
        waits = [asyncio.ensure_future(event.wait()) for event in (recording.over, session.ended)]
        try:
            while not any(wait.done() for wait in waits):
                left = recording.used + self._idle_s - time.monotonic()
                if left <= 0 and not session.busy:
                    return
                await asyncio.wait(
                    waits, timeout=max(left, 0.1), return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for wait in waits:
                wait.cancel()


def _digest(kind: str, value: str) -> str:
    return f"{kind}-{blake2b(value.encode('utf-8', 'surrogatepass'), digest_size=4).hexdigest()}"


def _line(trajectory: Trajectory) -> str:
    ids = sum(len(span.ids) for span in trajectory.spans if span.sampled)
    counted = [f"{name} {number}" for name, number in trajectory.branches.items() if number]
    branches = f" ({', '.join(counted)})" if counted else ""
    rows = sum(1 for _ in trajectory.samples())
    failed = "" if trajectory.error is None else f": {trajectory.error.message:.200}"
    text = f"{trajectory.key.task}: {len(trajectory.turns)} replies, {ids} sampled ids, {rows} rows"
    return f"{text}{branches}, {trajectory.stop}{failed}"


async def record_sessions(
    rollout: Rollout,
    *,
    port: int,
    idle_s: float,
    on_start: Callable[[str], None],
    note: Callable[[str], None],
    settings: ProxySettings | None = None,
    key: str | None = None,
    keyed_sampling: bool = True,
) -> list[Trajectory]:
    """Record the sessions of programs until cancelled; return the finished episodes. The URL goes
    to `on_start`.

    Args:
        key: API key that requests need; None for none. While the server listens, a file has it
            for this user's clients.
        keyed_sampling: whether all requests need it, or only those that end a session.

    Raises:
        ConfigError: for a port that is not available, or a key that cannot be written.
    """
    async with rollout.stream() as stream:
        sessions = RecordedSessions(
            stream, idle_s=idle_s, note=note, settings=settings or ProxySettings()
        )
        server = ProxyServer(
            port=port, recorded=sessions, key=key or "", keyed_sampling=keyed_sampling
        )
        try:
            await server.__aenter__()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"port {port} is not available ({reason}); choose another --port, or 0 for a free "
                "one"
            ) from None
        try:
            if key:
                tokens.publish(server.port, key)
            on_start(server.url)
            await server.run()
        except asyncio.CancelledError:
            pass
        finally:
            if key:
                tokens.withdraw(server.port, key)
            await sessions.close()
            await server.__aexit__()
        return sessions.trajectories
