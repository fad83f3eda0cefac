"""Environments of OpenEnv servers, through the generic client of `openenv-core`;
one session per episode.

`openenv_env` makes the factory; `OpenEnv` is the episode. What a server refuses because of the
model becomes an observation, by the codes in `mistakes`; any other error ends the episode.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwright.envs.env import Action, Env, Step
from turnwright.envs.gym import model_mistakes, seed_of, seeded_tasks
from turnwright.envs.scripted_play import Speak
from turnwright.envs.spec import FactoryOptions
from turnwright.envs.tasks import TaskSource
from turnwright.errors import ConfigError, EnvError, InvalidAction, ServerError
from turnwright.types import Messages, Task, Trajectory, as_messages

ParseAction = Callable[[str], Mapping[str, Any]]
"""Maps a reply's text to the fields of an action; raises `InvalidAction` (or
ValueError) for other text."""
ShowObservation = Callable[[dict[str, Any]], Messages | None]
"""Maps the fields of an observation to messages for the model."""

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
    """Make an environment of an OpenEnv server; needs `pip install '.[openenv]'`.

    Example::

        env = openenv_env("http://127.0.0.1:8000", action="message", observation="echoed_message")

    Args:
        url: URL of the server; `/ws` is appended. Each episode is one connection with its own
            environment on the server.
        action: function from a reply's text to an action's fields, or the name of the
            field for the complete text. By default a reply is a JSON object of the
            fields, plain or in a fenced block.
        observation: function from an observation's fields to messages for the model, or the
            name of the field to use. By default the text of an observation with a single field,
            else all fields as JSON.
        reset: arguments of the server's `reset` besides the seed; by default the task's
            `info["reset"]`, if any.
        mistakes: error codes of the server caused by the model; their messages become observations.
            Add `EXECUTION_ERROR` if the environment raises errors for bad actions.
        system: system message for tasks without one.
        max_turns: maximum replies per episode, in addition to the run's limit.
        tasks: by default one per seed, disjoint between splits. `info["seed"]` of a task, else a
            hash of its id, seeds the server's environment, if that takes a seed.
        solver, demonstrator, single_turn_best: as on an Env class.
        connect_s, call_s: seconds to connect, and for one answer; `limits.env_s` also applies.

    Raises:
        ConfigError: when openenv-core is not installed, or for an invalid setting.
    """
    if not re.match(r"(http|ws)s?://.", url):
        raise ConfigError(
            f"openenv_env({url!r}): a URL begins with http://, https://, ws:// or wss://"
        )
    for key, value in (("connect_s", connect_s), ("call_s", call_s)):
        if not value > 0:
            raise ConfigError(f"openenv_env({url!r}): {key} is {value}; it is over 0 seconds")
    _client_class()  # raises without openenv-core

    return OpenEnvFactory(
        system=system,
        max_turns=max_turns,
        tasks=seeded_tasks if tasks is None else tasks,
        solver=solver,
        demonstrator=demonstrator,
        single_turn_best=single_turn_best,
        url=url,
        parse=action,
        show=observation,
        begin=reset,
        mistakes=frozenset(mistakes),
        connect_s=connect_s,
        call_s=call_s,
    )


@dataclass(frozen=True, slots=True)
class OpenEnvFactory(FactoryOptions):
    """Factory returned by `openenv_env`: each call makes a new environment."""

    url: str
    parse: ParseAction | str | None
    show: ShowObservation | str | None
    begin: Callable[[Task], Mapping[str, Any]] | None
    mistakes: frozenset[str]
    connect_s: float
    call_s: float

    def __call__(self) -> OpenEnv:
        """Make a new environment; `reset` connects it."""
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
        """Connect and reset; return the task's messages and the first observation."""
        factory = self._factory
        arguments: dict[str, Any] = {}
        if factory.begin is not None:
            arguments = dict(factory.begin(task))
        elif isinstance(task.info.get("reset"), Mapping):
            arguments = dict(task.info["reset"])

        self._client = _client_class()(
            factory.url,
            connect_timeout_s=factory.connect_s,
            message_timeout_s=factory.call_s,
            mode="simulation",
        )
        result = await self._checked(self._client.reset(**{"seed": seed_of(task)} | arguments))
        if result.done:
            raise self._schema_error("its episode is over before it began")
        first_messages = as_messages(self._observation_message(result.observation))
        return [*factory.opening(task.messages), *first_messages]

    async def step(self, action: Action) -> Step:
        """Take the action of a reply.

        `done` becomes `terminated`, since the server does not report truncation.
        """
        fields = self._read(action.text)
        try:
            result = await self._checked(self._client.step(fields))
        except ServerError as error:
            if error.code in self._factory.mistakes:
                raise InvalidAction(str(error)) from error
            raise

        reward = result.reward
        is_number = isinstance(reward, (bool, int, float)) and math.isfinite(reward)
        if reward is not None and not is_number:
            raise self._schema_error(f"the reward is {reward!r:.80}, no finite number")
        self._rewarded = self._rewarded or reward is not None
        self._over = result.done
        return Step(
            self._observation_message(result.observation),
            float(reward or 0.0),
            terminated=self._over,
        )

    def reward(self, trajectory: Trajectory) -> float | None:
        """Return 0.0, or None if the server ended the episode without any reward."""
        return None if self._over and not self._rewarded else 0.0

    async def close(self) -> None:
        """Close the connection, and with it the server's environment."""
        client = self._client
        self._client = None
        if client is not None:
            await client.close()

    def _read(self, text: str) -> dict[str, Any]:
        """Return the fields of the action that a reply's text is."""
        parse = self._factory.parse
        if isinstance(parse, str):
            return {parse: text.encode("utf-8", "replace").decode()}

        with model_mistakes():  # surrogates and NaN included, which are not valid JSON
            fields = dict(_from_json(text) if parse is None else parse(text))
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        return fields

    def _observation_message(self, observation: dict[str, Any]) -> Messages | None:
        show = self._factory.show
        if callable(show):
            return show(observation)
        if show is not None:
            if show not in observation:
                raise EnvError(
                    f"{self._factory}: its observations have no {show!r}; they have "
                    f"{', '.join(observation) or 'none'}"
                )
            return _words(observation[show])

        if len(observation) == 1:
            return _words(next(iter(observation.values())))
        return _words(observation)

    async def _checked(self, call: Awaitable[Any]) -> Any:
        """Await a call and check the format of the answer."""
        try:
            result = await call
        except (ServerError, TimeoutError):
            raise
        except Exception as error:
            if isinstance(error, OSError) or type(error).__module__.startswith("websockets"):
                raise ServerError("connection", f"{self._factory.url}: {error}") from error
            if isinstance(error, json.JSONDecodeError):
                raise self._schema_error(f"no JSON: {error}") from error
            raise

        if not isinstance(result.observation, dict) or not isinstance(result.done, bool):
            raise self._schema_error(f"not an observation and done, but {result!r:.200}")
        return result

    def _schema_error(self, what: str) -> ServerError:
        return ServerError("schema", f"{self._factory.url} gave an answer of another form: {what}")


@functools.cache
def _client_class() -> Any:
    """Return a subclass of OpenEnv's generic client that keeps the details of server errors."""
    try:
        base: Any = importlib.import_module("openenv.core.generic_client").GenericEnvClient
        closed: Any = importlib.import_module("websockets.exceptions").ConnectionClosed
    except ImportError as error:
        raise ConfigError(
            f"openenv_env needs openenv-core ({error}); pip install openenv-core"
        ) from error

    class Client(base):  # type: ignore[misc]
        """Client that raises `ServerError`; its base raises RuntimeError without the code
        and the rejected fields."""

        async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
            try:
                await self._send(message)
            except closed:
                if self._ws is None:
                    raise  # otherwise read the server's last message, such as "full"
            answer = await self._receive()
            if not isinstance(answer, dict) or not isinstance(answer.get("data", {}), dict):
                raise ServerError(
                    "schema", f"{self._ws_url} gave an answer of another form: {answer!r:.200}"
                )
            if answer.get("type") == "error":
                raise _error_message(self._ws_url, answer.get("data", {}))
            return answer

    return Client


def _error_message(url: str, data: Mapping[str, Any]) -> ServerError:
    """Convert a server error, listing rejected fields with reasons."""
    code = str(data.get("code", "UNKNOWN"))
    errors = data.get("errors")
    refused: list[str] = []
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, Mapping) and isinstance(error.get("loc"), list):
            field = ".".join(map(str, error["loc"])) or "action"
            refused.append(f"{field}: {error.get('msg', 'refused')}")
    if refused:
        return ServerError(code, "; ".join(refused))
    return ServerError(code, f"{url}: {data.get('message') or 'it does not say why'} ({code})")


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
