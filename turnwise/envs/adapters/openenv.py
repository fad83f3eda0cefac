"""OpenEnv servers as worlds, through the generic client of the `openenv-core` package: a session for each episode."""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.envs.adapters.gym import AdapterOptions, seed_of, seeded_tasks
from turnwise.envs.base import Action, Env, Step
from turnwise.envs.scripted_play import Speak
from turnwise.envs.tasks import TaskSource
from turnwise.errors import ConfigError, EnvError, InvalidAction, ServerError
from turnwise.types import Messages, Task, Trajectory, as_messages

ParseAction = Callable[[str], Mapping[str, Any]]
"""A reply's text to the fields of an action; raises `InvalidAction` (or ValueError) for what is none."""
ShowObservation = Callable[[dict[str, Any]], Messages | None]
"""An observation's fields to what the model is told."""

_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*?)\n?```\Z", re.DOTALL)


def openenv_env(
    url: str,
    *,
    action: ParseAction | str | None = None,
    observation: ShowObservation | str | None = None,
    reset: Callable[[Task], Mapping[str, Any]] | None = None,
    mistakes: Sequence[str] = ("VALIDATION_ERROR",),
    system: str | None = None,
    max_turns: int | None = None,
    tasks: TaskSource | None = None,
    solver: Speak | None = None,
    demonstrator: Speak | None = None,
    single_turn_best: float | None = None,
    connect_s: float = 10.0,
    call_s: float = 60.0,
) -> OpenEnvFactory:
    """An environment that an OpenEnv server runs; needs `pip install '.[openenv]'`.

    Example::

        env = openenv_env("http://127.0.0.1:8000", action="message", observation="echoed_message")

    Args:
        url: of the server; `/ws` is added. An episode is one connection, which has an environment of its own there.
        action: a function from a reply's text to an action's fields; or the name of the field that takes the whole text. By
            default a reply is the fields as a JSON object, alone or in a fenced block.
        observation: a function from an observation's fields to what the model is told; or the name of the field to tell. By
            default the text of an observation that has no other field, else all fields as JSON.
        reset: what is given to the server's `reset` besides the seed; by default the task's `info["reset"]`, if any.
        mistakes: the server's error codes that are the model's doing: the message becomes an observation. Where the
            environment raises errors for bad actions, add `EXECUTION_ERROR`.
        system: a system message for tasks that have none.
        max_turns: most replies of an episode, besides the run's own limit.
        tasks: by default one per seed, none of them in both splits. A task's `info["seed"]` (else its id) seeds the server's
            environment, where that takes a seed.
        solver, demonstrator, single_turn_best: as on an Env class.
        connect_s, call_s: seconds to connect, and for one answer; `limits.env_s` holds too.

    Raises:
        ConfigError: when openenv-core is not installed, or a setting cannot be.
    """
    if not re.match(r"(http|ws)s?://.", url):
        raise ConfigError(f"openenv_env({url!r}): a URL begins with http://, https://, ws:// or wss://")
    for key, value in (("connect_s", connect_s), ("call_s", call_s)):
        if not value > 0:
            raise ConfigError(f"openenv_env({url!r}): {key} is {value}; it is over 0 seconds")
    _client_class()
    return OpenEnvFactory(
        url,
        action,
        observation,
        reset,
        frozenset(mistakes),
        connect_s,
        call_s,
        system=system,
        max_turns=max_turns,
        tasks=seeded_tasks if tasks is None else tasks,
        solver=solver,
        demonstrator=demonstrator,
        single_turn_best=single_turn_best,
    )


@dataclass(frozen=True, slots=True)
class OpenEnvFactory(AdapterOptions):
    """What `openenv_env` returns: call it for a fresh environment."""

    url: str
    parse: ParseAction | str | None = None
    show: ShowObservation | str | None = None
    begin: Callable[[Task], Mapping[str, Any]] | None = None
    mistakes: frozenset[str] = frozenset()
    connect_s: float = 10.0
    call_s: float = 60.0

    def __call__(self) -> OpenEnv:
        """A fresh environment; `reset` connects it."""
        return OpenEnv(self)

    def __repr__(self) -> str:
        return f"openenv_env({self.url!r})"


class OpenEnv(Env):
    """One episode on an OpenEnv server; made by `openenv_env`."""

    def __init__(self, factory: OpenEnvFactory) -> None:
        self._factory = factory
        self._client: Any = None
        self._over = False
        self._rewarded = False

    async def reset(self, task: Task, *, seed: int | None = None) -> Messages:
        """Connect and reset: the task's messages, then the first observation.

        Raises:
            ServerError: when the server cannot be reached, is full, or fails.
            TimeoutError: when it does not answer in time.
        """
        factory = self._factory
        arguments = dict(_given(task) if factory.begin is None else factory.begin(task))
        self._client = _client_class()(
            factory.url, connect_timeout_s=factory.connect_s, message_timeout_s=factory.call_s, mode="simulation"
        )
        result = await self._asked(self._client.reset(**{"seed": seed_of(task)} | arguments))
        if result.done:
            raise self._wrong("its episode is over before it began")
        return [*factory.opening(task), *as_messages(self._say(result.observation))]

    async def step(self, action: Action) -> Step:
        """Take the action that a reply names. The server does not say why an episode is over: `done` is `terminated`.

        Raises:
            InvalidAction: when it names none, or one that the server refuses.
            ServerError, TimeoutError: as `reset`.
        """
        fields = self._read(action.text)
        try:
            result = await self._asked(self._client.step(fields))
        except ServerError as error:
            if error.code in self._factory.mistakes:
                raise InvalidAction(str(error)) from error
            raise
        reward = result.reward
        if reward is not None and not (isinstance(reward, (bool, int, float)) and math.isfinite(reward)):
            raise self._wrong(f"the reward is {reward!r:.80}, no finite number")
        self._rewarded = self._rewarded or reward is not None
        self._over = result.done
        return Step(self._say(result.observation), float(reward or 0.0), terminated=self._over)

    def reward(self, trajectory: Trajectory) -> float | None:
        """Nothing more; None when the server ended the episode and never gave a reward."""
        return None if self._over and not self._rewarded else 0.0

    async def close(self) -> None:
        """Close the connection, and with it the server's environment."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _read(self, text: str) -> dict[str, Any]:
        """The fields of the action that a reply names."""
        parse = self._factory.parse
        if isinstance(parse, str):
            return {parse: text.encode("utf-8", "replace").decode()}
        try:
            fields = dict((_from_json if parse is None else parse)(text))
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except InvalidAction:
            raise
        except ValueError as error:  # half characters and NaN included, which no server can answer for
            raise InvalidAction(str(error) or "that is no action") from error
        return fields

    def _say(self, observation: dict[str, Any]) -> Messages | None:
        """What the model is told."""
        show = self._factory.show
        if callable(show):
            return show(observation)
        if show is not None:
            if show not in observation:
                raise EnvError(
                    f"{self._factory}: its observations have no {show!r}; they have {', '.join(observation) or 'none'}"
                )
            return _words(observation[show])
        return _words(next(iter(observation.values()))) if len(observation) == 1 else _words(observation)

    async def _asked(self, call: Awaitable[Any]) -> Any:
        """What the server says, of the form that it should have."""
        try:
            result = await call
        except (ServerError, TimeoutError):
            raise
        except Exception as error:
            if isinstance(error, OSError) or type(error).__module__.startswith("websockets"):
                raise ServerError("connection", f"{self._factory.url}: {error}") from error
            if isinstance(error, json.JSONDecodeError):
                raise self._wrong(f"no JSON: {error}") from error
            raise
        if not isinstance(result.observation, dict) or not isinstance(result.done, bool):
            raise self._wrong(f"not an observation and done, but {result!r:.200}")
        return result

    def _wrong(self, what: str) -> ServerError:
        return ServerError("schema", f"{self._factory.url} gave an answer of another form: {what}")


@functools.cache
def _client_class() -> Any:
    """OpenEnv's generic client, whose errors keep what the server says of them.

    Raises:
        ConfigError: when openenv-core is not installed.
    """
    try:
        base: Any = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        closed: Any = importlib.import_module("websockets.exceptions").ConnectionClosed
    except ImportError as error:
        raise ConfigError(f"openenv_env needs openenv-core ({error}); pip install openenv-core") from error

    class Client(base):  # type: ignore[misc]
        """Raises `ServerError`, where its base has a RuntimeError without the code and the fields in question."""

        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            try:
                await self._send(message)
            except closed:
                if self._ws is None:
                    raise  # else what the server said last (that it is full, say) is still to be read
            answer = await self._receive()
            if not isinstance(answer, dict) or not isinstance(answer.get("data", {}), dict):
                raise ServerError("schema", f"{self._ws_url} gave an answer of another form: {answer!r:.200}")
            if answer.get("type") == "error":
                raise _error_message(self._ws_url, answer.get("data", {}))
            return answer

    return Client


def _error_message(url: str, data: Mapping[str, Any]) -> ServerError:
    """An error as the server tells of it; of a field that it refuses, which and why."""
    errors = data.get("errors")
    refused = [
        f"{'.'.join(map(str, error['loc'])) or 'action'}: {error.get('msg', 'refused')}"
        for error in (errors if isinstance(errors, list) else ())
        if isinstance(error, Mapping) and isinstance(error.get("loc"), list)
    ]
    code = str(data.get("code", "UNKNOWN"))
    if refused:
        return ServerError(code, "; ".join(refused))
    return ServerError(code, f"{url}: {data.get('message') or 'it does not say why'} ({code})")


def _given(task: Task) -> Mapping[str, Any]:
    given = task.info.get("reset")
    return given if isinstance(given, Mapping) else {}


def _from_json(text: str) -> dict[str, Any]:
    text = text.strip()
    fenced = _FENCED.match(text)
    try:
        fields = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError) as error:
        raise InvalidAction(f"Say the action as a JSON object: {error}.") from error
    if not isinstance(fields, dict):
        raise InvalidAction("Say the action as a JSON object, its fields by name.")
    return fields


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
