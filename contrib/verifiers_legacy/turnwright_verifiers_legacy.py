"""Episodes of a `MultiTurnEnv` of `verifiers.legacy`, run step by step with replies from a rollout.

Once installed, `turnwright_compat.verifiers_env` and `tw.as_env_spec` accept these environments:
the entry point in `pyproject.toml` names `FRAMEWORK`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from turnwright.envs.env import Action, Env, Scores, Step
from turnwright.envs.foreign import ForeignObject, Framework
from turnwright.envs.tasks import split_tasks
from turnwright.envs.user_code import call_user
from turnwright.errors import ConfigError, EnvError, InvalidAction
from turnwright.types import Message, Task, Trajectory

_FAILED: ContextVar[list[Exception] | None] = ContextVar(
    "turnwright_verifiers_failed", default=None
)
"""Exceptions of reward functions, which verifiers itself would count as 0."""
_TRUNCATING = ("max_turns_reached", "max_total_completion_tokens_reached", "timeout_reached")
"""Stop conditions that truncate an episode."""


def legacy_factory(found: ForeignObject) -> LegacyFactory | None:
    """Return a factory of the episodes of a `verifiers.legacy` environment; None for other objects.

    Raises:
        ConfigError: for rewards that compare the rollouts of a group.
    """
    target = found.target
    if isinstance(target, type) or not all(
        hasattr(target, name) for name in ("env_response", "init_state", "rubric")
    ):
        return None
    if target.rubric.has_group_rewards:
        names = [
            name
            for rubric in _rubrics(target.rubric)
            for name in map(_name, filter(rubric._is_group_func, rubric.funcs))
        ]
        raise ConfigError(
            f"verifiers_env: {', '.join(names)} compares the rollouts of a group, which needs "
            "verifiers' own states of all of "
            'them; give such a reward as tw.RewardPart(function, of="group")'
        )
    return LegacyFactory(target)


@dataclass(frozen=True, slots=True)
class LegacyFactory:
    """Factory of the episodes of one environment."""

    source_env: Any

    def __call__(self) -> Env:
        """Make the environment of one episode."""
        return LegacyEnv(self.source_env)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """Return the rows of the dataset as tasks; without an evaluation dataset one
        row in five is held out."""
        source_env = self.source_env
        if source_env.eval_dataset_source is not None and source_env.dataset_source is not None:
            rows = source_env.get_dataset() if split == "train" else source_env.get_eval_dataset()
            return list(itertools.islice(map(_task_of_row, rows), n or None))
        unique = {task.id: task for task in map(_task_of_row, source_env.get_dataset())}
        return split_tasks([*unique.values()], seed=seed)[split != "train"][: n or None]


def _task_of_row(row: Mapping[str, Any]) -> Task:
    """Convert a dataset row: `prompt` opens the episode, `answer` is the answer,
    and the rest is `info`."""
    rest = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    return Task(row["prompt"], row.get("answer"), info=rest)


class LegacyEnv(Env):
    """Environment of one episode, with its own state of a shared verifiers environment;
    made by `LegacyFactory`."""

    def __init__(self, source_env: Any) -> None:
        self._source_env = source_env
        self._vf: Any = importlib.import_module(
            type(source_env).init_state.__module__.rpartition(".envs.")[0]
        )
        self._state: Any = None
        self._prompt: list[Any] = []
        self._cleaned = False

    async def reset(self, task: Task, *, seed: int | None = None) -> tuple[Message, ...]:
        """Make and set up the state; return the row's prompt.

        Raises:
            EnvError: for images, or an episode that is over at its start.
            Exception: any exception of `setup_state`.
        """
        source_env = self._source_env
        row = (
            {"example_id": 0}
            | dict(task.info)
            | {"prompt": [_plain(message) for message in task.messages]}
        )
        if task.answer is not None:
            row["answer"] = task.answer
        self._state = await source_env.init_state(row, _no_client(self._vf), "turnwright", {})
        self._state["timing"].generation.start = time.time()
        made = await source_env.setup_state(self._state)
        self._state = self._state if made is None else made
        self.tools = [_schema(tool) for tool in self._state.get("tool_defs") or ()]
        if await source_env.is_completed(self._state):
            raise EnvError(
                f"{type(source_env).__name__} is over before it began: "
                f"{self._state.get('stop_condition')}"
            )
        self._prompt = self._normal(await source_env.get_prompt_messages(self._state))
        return tuple(self._ours(message) for message in self._prompt)

    async def step(self, action: Action) -> Step:
        """Add a reply; return the environment's response, or end.

        Raises:
            InvalidAction: for a malformed tool call.
            EnvError: when the environment rewrites earlier messages.
            Exception: any exception of the environment, including verifiers' own errors.
        """
        source_env, state = self._source_env, self._state
        for call in action.tool_calls if self.tools else ():
            if call.error is not None:
                raise InvalidAction(call.error)
        await source_env.add_model_response(state, self._prompt, self._response(action))
        if await source_env.is_completed(state):
            return self._last(None)
        before = [*self._prompt, *state["trajectory"][-1]["completion"]]
        prompt = self._normal(await source_env.get_prompt_messages(state))
        if state.get("final_env_response") is not None:
            final = self._normal(state["final_env_response"])
            await source_env.is_completed(state)
            return self._last(tuple(self._ours(message) for message in final))
        if prompt[: len(before)] != before:
            raise EnvError(
                f"{type(source_env).__name__}.get_prompt_messages rewrites earlier messages; use a "
                "policy of rollout.history for that, and let the environment only append messages"
            )
        self._prompt = prompt
        return Step(tuple(self._ours(message) for message in prompt[len(before) :]))

    async def reward(self, trajectory: Trajectory) -> Scores:
        """Compute the rubric, by the names of its functions; sync functions run in threads.

        Raises:
            Exception: the first exception of a function; verifiers would log it and count 0.
        """
        state = self._state
        await self._clean()
        with _failures() as failed:
            await _recording(self._source_env.rubric).score_rollout(state)
        if failed:
            raise failed[0]
        weights: dict[str, float] = {}
        for rubric in _rubrics(self._source_env.rubric):
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                weights[_name(function)] = weights.get(_name(function), 0.0) or weight
        values: dict[str, float] = state["metrics"] or {}
        parts = {name: float(value) for name, value in values.items() if weights.get(name)}
        metrics = {name: float(value) for name, value in values.items() if name not in parts}
        return Scores(float(state["reward"]), (), parts, metrics)

    async def close(self) -> None:
        """Clean up the environment, if not yet done, and the rubric."""
        if self._state is not None:
            await self._clean()
            await self._source_env.rubric.cleanup(self._state)

    async def _clean(self) -> None:
        """Run the environment's clean-up once, before the reward, as verifiers does."""
        if not self._cleaned:
            self._cleaned = True
            await self._source_env.cleanup(self._state)

    def _last(self, observation: Sequence[Message] | None) -> Step:
        """End by a stop condition of the environment.

        A limit of one turn terminates instead of truncating.
        """
        why = str(self._state.get("stop_condition"))
        cut = why in _TRUNCATING and getattr(self._source_env, "max_turns", 0) != 1
        return Step(observation, terminated=not cut, truncated=cut, info={"stop_condition": why})

    def _normal(self, messages: Any) -> list[Any]:
        return list(
            importlib.import_module(f"{self._vf.__name__}.utils.message_utils").normalize_messages(
                messages
            )
        )

    def _response(self, action: Action) -> Any:
        """Convert a reply to the verifiers format."""
        types: Any = importlib.import_module(f"{self._vf.__name__}.types")
        calls = [
            types.ToolCall(
                id=call.id or f"call_{number}",
                name=call.name,
                arguments=json.dumps(dict(call.arguments)),
            )
            for number, call in enumerate(action.tool_calls if self.tools else ())
        ]
        message = types.ResponseMessage(
            content=action.text,
            reasoning_content=action.reasoning,
            tool_calls=calls or None,
            finish_reason="length" if action.truncated else "tool_calls" if calls else "stop",
            is_truncated=action.truncated,
        )
        return types.Response(
            id="turnwright", created=int(time.time()), model="turnwright", message=message
        )

    def _ours(self, message: Any) -> Message:
        """Convert a message of verifiers."""
        row = {
            key: value
            for key, value in message.model_dump(mode="json").items()
            if value is not None
        }
        row["tool_calls"] = [
            {"id": call["id"], "name": call["name"], "arguments": call["arguments"]}
            for call in row.get("tool_calls", ())
        ]
        return Message.of(row)


def _plain(message: Message) -> dict[str, Any]:
    if not isinstance(message.content, str) and any(
        not isinstance(part, str) for part in message.content
    ):
        raise EnvError(
            "verifiers_env: a task with images; environments of verifiers are played with texts "
            "only"
        )
    row = message.to_dict() | {"content": message.text}
    row["tool_calls"] = [
        call.to_dict() | {"id": call.id or f"call_{n}"} for n, call in enumerate(message.tool_calls)
    ]
    return {key: value for key, value in row.items() if value} | {"content": message.text}


def _schema(tool: Any) -> dict[str, Any]:
    body = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": dict(tool.parameters or {}),
    }
    return {"type": "function", "function": body}


@functools.cache
def _no_client(vf: Any) -> Any:
    """Return a stand-in for the model client that verifiers requires; calling it raises an error."""  # noqa: E501
    base: Any = importlib.import_module(f"{vf.__name__}.clients").Client

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise EnvError(
            "verifiers_env: the environment asks state['client'] for a reply, and here the "
            "rollout does"
        )

    methods = {name: refuse for name in base.__abstractmethods__}
    return type("NoClient", (base,), methods | {"get_response": refuse})(None)


@contextlib.contextmanager
def _failures() -> Iterator[list[Exception]]:
    failed: list[Exception] = []
    token = _FAILED.set(failed)
    try:
        yield failed
    finally:
        _FAILED.reset(token)


def _rubrics(rubric: Any) -> list[Any]:
    """Return a rubric, or the members of a rubric group."""
    inner = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [found for one in inner for found in _rubrics(one)]


def _recording(rubric: Any) -> Any:
    """Copy a rubric with functions that record their exceptions and run in threads if sync."""
    made = copy.copy(rubric)
    if (inner := getattr(rubric, "rubrics", None)) is not None:
        made.rubrics = [_recording(one) for one in inner]
    made.funcs = [_record_errors(function) for function in rubric.funcs]
    return made


def _record_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return float(await call_user(partial(function, *args, **kwargs), {}))
        except Exception as error:
            if (failed := _FAILED.get()) is not None:
                failed.append(error)
            raise

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", repr(function)))


FRAMEWORK = Framework("verifiers_legacy", legacy_factory)
