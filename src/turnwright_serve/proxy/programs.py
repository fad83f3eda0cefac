"""Programs as agents: play an unmodified program as an episode.

The program runs beside a recording proxy and is scored at its end: `program` returns the agent
function, and `Program.__call__` plays one episode. What the proxy records of it is in `session`,
how its sandbox is made in `sandboxed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from turnwright.envs.env import Scores
from turnwright.envs.isolation.sandbox import Sandbox, SandboxError
from turnwright.envs.tasks import TaskSource
from turnwright.envs.user_code import call_user
from turnwright.errors import EnvError, UsageError, words
from turnwright.rollouts.agent_function import Model
from turnwright.types import StopReason, Task, Trajectory
from turnwright.types.outcomes import shortened
from turnwright_serve.proxy.sandbox_launcher import RELAY_ENDED
from turnwright_serve.proxy.sandboxed import HOME, WORK, check_sandbox, run_sandboxed
from turnwright_serve.proxy.session import ProxySession, ProxySettings

if TYPE_CHECKING:
    from turnwright_serve.proxy.server import ProxyServer

MAX_OUTPUT = 2**20
"""Maximum characters of each output stream that a score reads; of longer output the end is kept."""
END_S = 10.0
"""Seconds that a program has to end after its session did, before it is killed."""
_INHERITED = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "NODE_PATH",
    "SSL_CERT_FILE",
)
"""Variables of this process that a program has; others, keys among them, are not passed on."""
_MARK = "TURNWRIGHT_SESSION"
"""Variable by which all processes of a program are found, also those that left its group."""

Score = Callable[["ProgramResult"], Any]
Files = Mapping[str, str | bytes] | Callable[[Task], Mapping[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """What a program leaves, for its score."""

    task: Task
    trajectory: Trajectory
    """The episode's record; its `reward` is not set yet."""
    exit_code: int | None
    """Exit status; negative for a signal; None for a function and for a program that was killed."""
    output: str
    """Standard output; what a function returned, if that is a text."""
    errors: str
    """Standard error."""
    directory: Path
    """The program's working directory, removed after the score."""
    stop: StopReason
    """`done`, or the limit that ended the episode."""
    returned: Any = None
    """What a function returned."""


@dataclass(frozen=True, slots=True)
class ProgramEndpoint:
    """Where a program finds the model; passed to a function in place of a command."""

    task: Task
    root: str
    """Root of the session: the base URL of Anthropic's clients."""
    key: str
    """API key, for programs that cannot have the session in their base URL."""
    directory: Path
    """Working directory."""
    model: str = "turnwright"
    gate: tuple[int, Path] | None = None
    """Port of the server and its Unix socket, for programs in a sandbox."""

    @property
    def base_url(self) -> str:
        """Base URL of OpenAI's clients."""
        return f"{self.root}/v1"

    @property
    def server(self) -> str:
        """URL of the server without the session, for programs that send `key`."""
        return self.root.partition("/s/")[0]

    def values(self, directory: str | None = None) -> dict[str, str]:
        """Return the values of `{name}` in commands and variables.

        `directory` is the working directory as the program sees it.
        """
        return {
            "base_url": self.base_url,
            "root": self.root,
            "server": self.server,
            "key": self.key,
            "task": "\n".join(message.text for message in self.task.messages),
            "model": self.model,
            "dir": directory or str(self.directory),
            "python": sys.executable,
        }

    def variables(self, home: str) -> dict[str, str]:
        """Return the environment variables that point common clients to the session."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.root,
            "ANTHROPIC_API_KEY": self.key,
            "TURNWRIGHT_MODEL": self.model,
            "TURNWRIGHT_TASK": self.values()["task"],
            "HOME": home,
            "TMPDIR": home,
            _MARK: self.key,
        }


@dataclass(frozen=True, slots=True)
class Program:
    """An agent function that runs a program; made by `program`."""

    command: Sequence[str] | Callable[[ProgramEndpoint], Any]
    score: Score
    files: Files | None
    env: Mapping[str, str]
    exit_codes: Sequence[int]
    seconds: float | None
    settings: ProxySettings
    tasks: TaskSource | None = None
    sandbox: Sandbox | None = None

    async def __call__(self, task: Task, model: Model) -> Any:
        """Play one episode."""
        session = ProxySession(model, self.settings)
        directory = Path(tempfile.mkdtemp(prefix="turnwright-"))
        try:
            async with shared_server() as server:
                try:
                    endpoint = ProgramEndpoint(
                        task=task,
                        root=server.open(session),
                        key=session.token,
                        directory=directory,
                        model=self._model,
                        gate=None if server.socket is None else (server.port, server.socket),
                    )
                    end = await self._run(endpoint, session)
                finally:
                    server.close_session(session)
                    await session.end()

            if session.error is not None:
                raise session.error
            return await self._score(task, model, session, directory, end)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def _model(self) -> str:
        return self.settings.models[0] if self.settings.models else "turnwright"

    async def _run(self, endpoint: ProgramEndpoint, session: ProxySession) -> _End:
        """Run the program until it ends, its session does, or its time is over."""
        seconds = self.seconds
        if seconds is None:
            # What is left of the limit is for the end of the program and its score.
            limit = session.model.limits.wall_clock_s
            seconds = max(limit / 2, limit - END_S - 5)

        over = asyncio.Event()
        work = asyncio.ensure_future(self._work(endpoint, seconds, over))
        session_end = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait(
                [work, session_end], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            late = not work.done() and not session_end.done()
            if session_end.done() and not work.done():
                await asyncio.wait([work], timeout=END_S)

            over.set()
            if not work.done() and self.sandbox is not None:
                # The sandbox kills the program now, and hands out its files.
                await asyncio.wait([work], timeout=END_S)
            if not work.done():
                return _End(late=late)
            return replace(work.result(), late=late)
        finally:
            work.cancel()
            session_end.cancel()
            await asyncio.gather(work, session_end, return_exceptions=True)

    async def _work(self, endpoint: ProgramEndpoint, seconds: float, over: asyncio.Event) -> _End:
        """Run the function, the command, or the command in a sandbox, which ends once `over` is
        set."""
        files = self.files(endpoint.task) if callable(self.files) else self.files or {}
        files = checked_files(files)
        if callable(self.command):
            write_files(endpoint.directory, files)
            return await _call(self.command, endpoint)
        if self.sandbox is None:
            write_files(endpoint.directory, files)
            return await _process(self.command, endpoint, self.env)

        box = replace(self.sandbox, seconds=seconds + 2 * END_S, output=MAX_OUTPUT)
        values = endpoint.values(WORK)
        command = [fill(argument, values) for argument in self.command]
        env = endpoint.variables(HOME)
        env |= {name: fill(value, values) for name, value in self.env.items()}
        # The sandbox works here, so this is Linux, where the server has a socket.
        assert endpoint.gate is not None
        try:
            ran = await run_sandboxed(box, command, env, files, endpoint.gate, over)
        except SandboxError as error:
            return _End(error=EnvError(str(error)))

        streams = {".home/stdout": ran.stdout, ".home/stderr": ran.stderr}
        write_files(endpoint.directory, {**ran.files, **streams})
        if ran.limit == "memory" and ran.signal is not None:
            fault = EnvError(
                "the program was killed: its processes together held more than "
                f"{box.memory >> 20} MiB; give it more with sandbox = {{ memory = BYTES }}"
            )
            return _End(error=fault)
        if ran.signal is not None and not ran.timed_out and not over.is_set():
            # The relay to the endpoint gave up, or the program killed its own first process:
            # nothing that a score could judge.
            relay_lines = [line for line in ran.stderr.splitlines() if line.startswith(RELAY_ENDED)]
            why = shortened(relay_lines[-1] if relay_lines else _last_line(ran.stderr))
            fault = EnvError(
                f"the program's first process in the sandbox was ended by {ran.signal}: {why}"
            )
            return _End(error=fault)
        return _End(ran.exit_status)

    async def _score(
        self, task: Task, model: Model, session: ProxySession, directory: Path, end: _End
    ) -> Any:
        stop = self._stop(session, directory, end)
        output = end.returned
        if not isinstance(output, str):
            output = end.read(directory, "stdout")
        result = ProgramResult(
            task=task,
            trajectory=model.trajectory,
            exit_code=end.code,
            output=output,
            errors=end.read(directory, "stderr"),
            directory=directory,
            stop=stop,
            returned=end.returned,
        )

        value = await call_user(partial(self.score, result), {})
        if stop is StopReason.DONE:
            return value
        scores = value if isinstance(value, Scores) else Scores(value)
        return replace(scores, status=stop)

    def _stop(self, session: ProxySession, directory: Path, end: _End) -> StopReason:
        """Return why the episode stopped; raise the error of a program that failed.

        A limit goes first: a program whose requests are refused may well end with an error.
        """
        if session.limit is not None:
            return StopReason(session.limit.reason)
        if end.late:
            return StopReason.WALL_CLOCK

        if end.error is not None:
            raise end.error
        if end.code is not None and end.code not in self.exit_codes:
            last = shortened(_last_line(end.read(directory, "stderr")))
            raise EnvError(
                f"the program ended with status {end.code}: {last}; see exit_codes for others "
                "than 0"
            )
        return StopReason.DONE


def program(
    command: Sequence[str] | Callable[[ProgramEndpoint], Any],
    *,
    score: Score,
    files: Files | None = None,
    env: Mapping[str, str] | None = None,
    exit_codes: Sequence[int] = (0,),
    seconds: float | None = None,
    tasks: TaskSource | None = None,
    untrained: Iterable[str] = ("side",),
    models: Iterable[str] = (),
    sandbox: bool | Sandbox | Mapping[str, Any] = False,
) -> Program:
    """Return an agent function that runs a program for each episode and records what
    the model samples for it.

    The program speaks to a chat API (chat completions, Responses or Messages) at an address of this
    machine that is its own. It has a working directory and a home directory of its own, and no
    variables of this process but the search paths, the language and the time zone. When it ends,
    meets a limit or its time is over, all its processes are killed, and it is scored.

    Example::

        play = turnwright_serve.program(
            ["python", "agent.py", "{task}"],
            score=lambda result: float("done" in result.output),
        )
        trajectories = tw.rollout(play, tasks, engine)

    Args:
        command: the program and its arguments, in which `{task}`, `{base_url}`, `{root}`, `{key}`,
            `{model}`, `{dir}` and `{python}` are replaced by those of the episode; or a function
            (also async) of a `ProgramEndpoint`, which runs in this process.
        score: function `(result) -> reward` of a `ProgramResult`; also called where a
            limit ended the program.
        files: texts or bytes by relative path, written to the working directory first;
            or a function of the task.
        env: further environment variables, with the same names in braces.
        exit_codes: exit statuses of a program that did its work; another one is a failure of the
            program, not a reward of 0.
        seconds: maximum seconds of the program; None leaves 15 of `limits.wall_clock_s`, at most
            half of it, for its end and the score.
        tasks: tasks of the environment, as on an Env class.
        untrained: reasons of branches (`side`, `subagent`, `compacted`, ...) whose replies are
            recorded and not trained.
        models: names of models that requests may ask for; by default any.
        sandbox: whether a command runs in a `Sandbox`, without a network but for its endpoint; or
            the sandbox, or a table of its limits. It can read the system's programs, this Python,
            files and directories that the command names, and `readable`. Of its working directory,
            regular files are copied out for the score.

    Raises:
        UsageError: for an empty command, without the packages of the extra `serve`, for a function
            in a sandbox, or where the sandbox does not work.
    """
    _server_class()
    if not callable(command):
        is_text = isinstance(command, str)
        if is_text or not command or not all(isinstance(argument, str) for argument in command):
            raise UsageError(
                'program: the command is a list of texts, such as ["python", "agent.py"], not '
                f"{command!r:.80}"
            )
        command = tuple(command)
    settings = ProxySettings(untrained=tuple(untrained), models=tuple(models))
    if sandbox and callable(command):
        raise UsageError(
            "program: a function runs in this process, so it cannot be in a sandbox; give a command"
        )
    box = check_sandbox(sandbox, () if callable(command) else command)
    return Program(
        command=command,
        score=score,
        files=files,
        env=dict(env or {}),
        exit_codes=tuple(exit_codes),
        seconds=seconds,
        settings=settings,
        tasks=tasks,
        sandbox=box,
    )


@dataclass(frozen=True, slots=True)
class _End:
    """How a program ended."""

    code: int | None = None
    returned: Any = None
    error: BaseException | None = None
    late: bool = False

    def read(self, directory: Path, name: str) -> str:
        """Return the end of an output stream."""
        try:
            with (directory / ".home" / name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_OUTPUT))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


async def _call(function: Callable[[ProgramEndpoint], Any], endpoint: ProgramEndpoint) -> _End:
    try:
        return _End(returned=await call_user(partial(function, endpoint), {}))
    except Exception as error:
        return _End(error=error)


async def _process(
    command: Sequence[str], endpoint: ProgramEndpoint, more: Mapping[str, str]
) -> _End:
    """Run a command with a home directory of its own, and kill all its processes at the end."""
    home = endpoint.directory / ".home"
    home.mkdir(exist_ok=True)
    values = endpoint.values()
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    env |= endpoint.variables(str(home))
    env |= {name: fill(value, values) for name, value in more.items()}

    with (home / "stdout").open("wb") as stdout, (home / "stderr").open("wb") as stderr:
        try:
            process = await asyncio.create_subprocess_exec(
                *(fill(argument, values) for argument in command),
                cwd=endpoint.directory,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            fault = f"the program {command[0]!r:.80} cannot be started: {words(error)}"
            return _End(error=EnvError(fault))

    try:
        return _End(await process.wait())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(kill_marked, endpoint.key)
        await process.wait()


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with `{name}` replaced, once; other braces stay."""
    pieces = []
    done = 0
    start = text.find("{")
    while start >= 0:
        pieces.append(text[done:start])
        end = text.find("}", start)
        name = text[start + 1 : end] if end > 0 else ""
        if name in values:
            pieces.append(values[name])
            done = end + 1
        else:
            pieces.append("{")
            done = start + 1
        start = text.find("{", done)
    return "".join(pieces) + text[done:]


def kill_marked(key: str) -> int:
    """Kill the processes that have a session's key in their environment, until none is left.

    Returns how many there were. It works only where `/proc` lists processes, and does not find a
    process that cleared its environment.
    """
    mark = f"{_MARK}={key}".encode()
    killed = 0
    # More than once: a process may start others while it is looked for.
    for _ in range(100):
        environments = Path("/proc").glob("[0-9]*/environ")
        marked = [path for path in environments if mark in _bytes(path).split(b"\0")]
        if not marked:
            break
        for path in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(path.parent.name), signal.SIGKILL)
                killed += 1
    return killed


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def checked_files(files: Mapping[str, str | bytes]) -> Mapping[str, str | bytes]:
    """Return files of a task; raise `EnvError` for a path that leaves the directory."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise EnvError(
                f"the file {name!r:.80} is not inside the program's directory; give relative paths"
            )
    return files


def write_files(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files below a directory; raise `EnvError` as `checked_files`."""
    for name, content in checked_files(files).items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)


def _server_class() -> type[ProxyServer]:
    """Import the server; raise `UsageError` without its packages."""
    try:
        from turnwright_serve.proxy.server import ProxyServer
    except ImportError as error:
        needs = f"programs need starlette and uvicorn ({error.name} is missing)"
        raise UsageError(f"{needs}: pip install 'turnwright[serve]'") from None
    return ProxyServer


class _SharedServer:
    """The server of an event loop, open while an episode uses it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._users = 0
        self._server: ProxyServer | None = None

    async def __aenter__(self) -> ProxyServer:
        async with self._lock:
            if self._server is None:
                self._server = await _server_class()().__aenter__()
            self._users += 1
            return self._server

    async def __aexit__(self, *error: object) -> None:
        async with self._lock:
            self._users -= 1
            if not self._users and self._server is not None:
                server = self._server
                self._server = None
                await server.__aexit__()


_servers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedServer] = (
    weakref.WeakKeyDictionary()
)


def shared_server() -> AbstractAsyncContextManager[ProxyServer]:
    """Return the server of the event loop that runs, which is open while it is in use.

    Raises:
        UsageError: when it is entered, without the packages of the extra `serve`.
    """
    return _servers.setdefault(asyncio.get_running_loop(), _SharedServer())
