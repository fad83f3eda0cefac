"""Schedulers of ms-swift's multi-turn episodes, by name.

User code derives from `MultiTurnScheduler`, whose `run` is the loop of a trajectory: a reply,
`on_turn_end`, `check_finished`, `step`. `_Rows` adds up the ids and masks of its turns. The engine
that schedulers call here is in `engine.py`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import re
from typing import Any

from turnwright.envs.user_imports import import_for_user
from turnwright_compat.swift.environments import OpenEnvWrapper, envs

# ms-swift's own, where it is installed: its trainer reads what the schedulers return.
_protocol: Any = import_for_user(
    "swift.infer_engine.protocol", fromlist=("RolloutInferRequest", "RolloutOutput")
)
RolloutInferRequest, RolloutOutput = _protocol.RolloutInferRequest, _protocol.RolloutOutput
MathAccuracy: Any = import_for_user("swift.rewards.orm", fromlist=("MathAccuracy",)).MathAccuracy
Messages: Any = import_for_user("swift.template", fromlist=("Messages",)).Messages
remove_response: Any = import_for_user("swift.utils", fromlist=("remove_response",)).remove_response

Request = Any
"""A `RolloutInferRequest`."""
Choice = Any
"""A `ChatCompletionResponseChoice`."""


class RolloutScheduler:
    """One turn.

    A scheduler is one object for all trajectories, which differ in `infer_request.uuid`.
    """

    infer_engine: Any = None
    max_turns: int | None = None
    _tokenizer: Any = None

    def __init__(
        self, infer_engine: Any = None, max_turns: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        self.infer_engine = infer_engine
        self.max_turns = max_turns
        self._tokenizer = kwargs.get("tokenizer")

    async def on_trajectory_start(self, requests: list[Request]) -> None:
        """Called before the first turn; may change the requests."""

    async def on_turn_end(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        """Called after each reply; `done` replaces `check_finished`,
        `rollout_infos` reach the reward."""
        return {}

    async def run(self, infer_request: Request, request_config: Any, **kwargs: Any) -> Any:
        """Play a trajectory."""
        response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        ids = list(response.choices[0].token_ids)
        return RolloutOutput(
            response=response,
            messages=infer_request.messages,
            response_token_ids=[ids],
            response_loss_mask=[[1] * len(ids)],
            rollout_infos={"num_turns": 1},
        )

    @property
    def engine(self) -> Any:
        """The engine."""
        return self.infer_engine

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given to the constructor, else the engine's."""
        if self._tokenizer is not None:
            return self._tokenizer
        return None if self.infer_engine is None else self.infer_engine.tokenizer


class MultiTurnScheduler(RolloutScheduler):
    """Several turns: `step` makes the next request, `check_finished` ends; or `run` is replaced."""

    async def run(self, infer_request: Request, request_config: Any, **kwargs: Any) -> Any:
        """Play a trajectory by `step` and `check_finished`."""
        request = infer_request
        turn = 1
        rows = _Rows()
        await _awaited(self.on_trajectory_start([request]))
        remove_response(request.messages)

        while True:
            response = await self.infer_engine.infer_async(request, request_config, **kwargs)
            choice = response.choices[0]
            continued = self._append(request.messages, choice.message.content, turn)

            # The hooks read texts; contents that are ids are restored after them.
            decoded = self._as_text(request.messages)
            end = await _awaited(self.on_turn_end(request, choice, turn)) or {}
            rows.infos.update(end.get("rollout_infos") or {})
            is_done = end.get("done", self.check_finished(request, choice, turn))
            for message, ids in decoded:
                message["content"] = ids
            if is_done or (self.max_turns and turn >= self.max_turns):
                rows.add(choice, {}, continued)
                rows.infos["num_turns"] = turn
                return rows.output(response, request.messages)

            sampled_ids = list(choice.token_ids)
            next_step = _as_dict(self.step(request, choice, turn))
            request = next_step["infer_request"]
            rows.add(choice, next_step, continued, sampled_ids)
            if "response_token_ids" in next_step:
                last_reply = _last_reply(request.messages)
                if last_reply is not None:
                    last_reply["content"] = list(rows.ids[-1])
            turn += 1

    def step(self, infer_request: Request, response_choice: Choice, current_turn: int) -> Any:
        """Return the next request; as `{"infer_request": ...}` with `response_token_ids`,
        `response_loss_mask`, ... too."""
        raise NotImplementedError("implement step, or replace run")

    def check_finished(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> bool:
        """Return whether the trajectory is over: at a cut reply, and after `max_turns`."""
        if response_choice.finish_reason == "length":
            return True
        return bool(self.max_turns and current_turn >= self.max_turns)

    def _append(self, messages: list[dict[str, Any]], completion: str, turn: int) -> bool:
        """Append a reply, to the last message if that is the assistant's; return whether it is."""
        if turn > 1 and not messages[-1]["content"]:
            messages.pop()
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": completion})
            return False
        self._as_text(messages[-1:])
        messages[-1]["content"] += completion
        return True

    def _as_text(self, messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
        """Decode contents that are ids; return them, to be restored."""
        decoded = []
        for message in messages:
            if message["role"] == "assistant" and _are_ids(message["content"]):
                decoded.append((message, message["content"]))
        for message, ids in decoded:
            message["content"] = self.tokenizer.decode(ids, skip_special_tokens=False)
        return decoded

    @staticmethod
    def _extract_logprobs_from_choice(response_choice: Choice) -> list[float]:
        entries = (response_choice.logprobs or {}).get("content", ())
        return [entry["logprob"] for entry in entries]


class _Rows:
    """What the turns of a trajectory add up to."""

    def __init__(self) -> None:
        self.ids: list[list[int]] = []
        self.masks: list[list[int]] = []
        self.logprobs: list[list[float]] = []
        self.infos: dict[str, Any] = {}
        self._edited = False
        """Whether a turn continued ids that `step` did not give, so that texts alone say what was
        kept."""
        self._implied = False
        """Whether `step` gave no ids at the last turn."""

    def add(
        self,
        choice: Choice,
        next_step: dict[str, Any],
        continued: bool,
        sampled_ids: list[int] | None = None,
    ) -> None:
        """Add a turn, to the last message if it was continued."""
        self._edited = self._edited or (continued and self._implied)
        self._implied = "response_token_ids" not in next_step

        if sampled_ids is None:
            sampled_ids = list(choice.token_ids)
        ids = list(next_step.get("response_token_ids", sampled_ids))
        mask = list(next_step.get("response_loss_mask") or [1] * len(ids))
        if len(mask) != len(ids):
            raise ValueError(
                f"step returned {len(ids)} response_token_ids and {len(mask)} of response_loss_mask"
            )
        logprobs = list(
            next_step.get("rollout_logprobs")
            or MultiTurnScheduler._extract_logprobs_from_choice(choice)
        )
        self.infos.update(next_step.get("rollout_infos") or {})

        for rows, added in ((self.ids, ids), (self.masks, mask), (self.logprobs, logprobs)):
            if continued and rows:
                rows[-1].extend(added)
            else:
                rows.append(added)

    def output(self, response: Any, messages: list[dict[str, Any]]) -> Any:
        """Return a `RolloutOutput`; without logprobs unless each trained id has one."""
        if self._edited:
            return RolloutOutput(response=response, messages=messages, rollout_infos=self.infos)

        complete = sum(map(sum, self.masks)) == sum(map(len, self.logprobs))
        # By name: with ms-swift installed, it is a pydantic model of its own.
        return RolloutOutput(
            response=response,
            messages=messages,
            response_token_ids=self.ids,
            response_loss_mask=self.masks,
            rollout_infos=self.infos,
            rollout_logprobs=self.logprobs if complete else [],
        )


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _are_ids(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], int)


def _last_reply(messages: list[dict[str, Any]]) -> Any:
    """Return the last message of the assistant that is not empty; None without one."""
    for message in reversed(messages):
        if message["role"] == "assistant" and message["content"]:
            return message
    return None


def _as_dict(returned: Any) -> dict[str, Any]:
    """Return what `step` made as a dict; releases before 3.8 had a request, or one with a dict."""
    if isinstance(returned, dict):
        return returned
    request, infos = returned if isinstance(returned, tuple) else (returned, {})
    return {"infer_request": request, "rollout_infos": dict(infos)}


class MathTipsScheduler(MultiTurnScheduler):
    """Once, if the answer is wrong: go back to the thoughts, and say there that
    it seems to be wrong."""

    tips_prompt = "But wait... It seems I made a mistake,"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    def check_finished(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> bool:
        last = infer_request.messages[-1]["content"]
        if self.tips_prompt in last:
            return True
        if self.acc_func([last], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        text = response_choice.message.content
        ids = list(response_choice.token_ids)
        cut = min(
            (text.index(tag) for tag in ("<answer>", "</think>") if tag in text), default=len(text)
        )
        if cut < len(text):
            for size in range(1, len(ids) + 1):
                if len(self.tokenizer.decode(ids[:size])) >= cut:
                    ids = ids[:size]
                    break

        tips = list(self.tokenizer.encode(self.tips_prompt, add_special_tokens=False))
        infer_request.messages[-1]["content"] = text[:cut] + self.tips_prompt
        return {
            "infer_request": infer_request,
            "response_token_ids": ids + tips,
            "response_loss_mask": [1] * len(ids) + [0] * len(tips),
            "rollout_logprobs": self._extract_logprobs_from_choice(response_choice)[: len(ids)],
        }


class MathTipsMultiTurnScheduler(MultiTurnScheduler):
    """Once, if the answer is wrong: say so in a new turn (release 3.6)."""

    tips_prompt = (
        "The answer is not correct, It seems You made a mistake, you need to recheck "
        "very carefully."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.acc_func = kwargs.get("acc_function") or MathAccuracy()

    def check_finished(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> bool:
        if self.tips_prompt in infer_request.messages[-2]["content"]:
            return True
        content = response_choice.message.content
        if self.acc_func([content], [infer_request.data_dict["solution"]])[0] == 1:
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request: Request, response_choice: Choice, current_turn: int) -> Any:
        infer_request.messages.append({"role": "user", "content": self.tips_prompt})
        return {"infer_request": infer_request}


class ThinkingModelTipsScheduler(MathTipsMultiTurnScheduler):
    """The same, with a row for each turn that has no thoughts but those of its last reply."""

    async def run(self, infer_request: Request, request_config: Any, **kwargs: Any) -> Any:
        outputs = []
        turn = 1
        while True:
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            choice = response.choices[0]
            infer_request.messages.append({"role": "assistant", "content": choice.message.content})

            messages = copy.deepcopy(infer_request.messages)
            for message in messages[:-1]:
                if message["role"] == "assistant" and isinstance(message["content"], str):
                    message["content"] = message["content"].split("</think>")[-1].strip()
            outputs.append(
                RolloutOutput(
                    response=response,
                    messages=messages,
                    response_token_ids=[list(choice.token_ids)],
                    rollout_infos={"num_turns": turn},
                )
            )

            if self.check_finished(infer_request, choice, turn):
                return outputs
            infer_request = self.step(infer_request, choice, turn)["infer_request"]
            turn += 1


class GYMScheduler(MultiTurnScheduler):
    """Turns of an environment of `envs`, named by `env_config` of the row or by `gym_env`."""

    def __init__(
        self, infer_engine: Any = None, max_turns: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.gym_env_name = kwargs.get("gym_env")
        self._envs: dict[Any, Any] = {}
        self._total_rewards: dict[Any, float] = {}
        self._step_rewards: dict[Any, list[float]] = {}
        self._pending_obs: dict[Any, Any] = {}

    async def on_trajectory_start(self, requests: list[Request]) -> None:
        for request in requests:
            env = self._create_env((request.data_dict or {}).get("env_config") or {})
            observation, _, system = await _awaited(env.reset(request))
            self._begin(request, env, observation, system)

    def _begin(self, request: Request, env: Any, observation: Any, system: str | None) -> None:
        """Set the messages and the state of a trajectory."""
        request.messages = [{"role": "system", "content": system}] if system else []
        request.messages.append({"role": "user", "content": observation})

        uuid = request.uuid
        self._envs[uuid] = env
        self._total_rewards[uuid] = 0.0
        self._step_rewards[uuid] = []
        self._pending_obs[uuid] = None

    async def on_turn_end(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        env = self._envs.get(infer_request.uuid)
        if env is None:
            return {"done": True, "rollout_infos": {}}
        observation, reward, done, _ = await _awaited(
            env.step(copy.deepcopy(infer_request.messages))
        )
        return await self._end_turn(infer_request.uuid, observation, reward, done)

    async def _end_turn(
        self, uuid: Any, observation: Any, reward: Any, done: bool
    ) -> dict[str, Any]:
        """Add a reward and keep the observation; at the end, close the environment."""
        self._total_rewards[uuid] += float(reward)
        self._step_rewards[uuid].append(float(reward))
        self._pending_obs[uuid] = None if done else observation
        infos = {
            "total_reward": self._total_rewards[uuid],
            "step_rewards": list(self._step_rewards[uuid]),
            "gym_done": done,
        }
        if done:
            await self._close_and_remove(uuid)
        return {"done": done, "rollout_infos": infos}

    async def _close_and_remove(self, uuid: Any) -> None:
        """Forget a trajectory and close its environment."""
        env = self._envs.pop(uuid, None)
        for state in (self._total_rewards, self._step_rewards, self._pending_obs):
            state.pop(uuid, None)
        if env is not None:
            await self._close(env)

    async def _close(self, env: Any) -> None:
        await _awaited(env.close())

    def step(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        observation = self._pending_obs.get(infer_request.uuid)
        if observation is not None:
            infer_request.messages.append({"role": "user", "content": observation})
            self._pending_obs[infer_request.uuid] = None
        return {"infer_request": infer_request}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        name = env_config.get("name", self.gym_env_name)
        if name not in envs:
            raise ValueError(f"no environment {name!r}; registered: {', '.join(envs)}")
        return envs[name](env_config)


class OpenEnvScheduler(GYMScheduler):
    """Turns of an environment on an OpenEnv server, which `env_config` of the row names."""

    async def on_trajectory_start(self, requests: list[Request]) -> None:
        defaults = getattr(self, "env_config_defaults", {})
        for request in requests:
            config = {**defaults, **((request.data_dict or {}).get("env_config") or {})}
            env = self._create_env(config)
            observation, _ = await asyncio.to_thread(env.reset)
            text = self.format_observation(observation)
            self._begin(request, env, text, config.get("system_message"))

    async def on_turn_end(
        self, infer_request: Request, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        env = self._envs.get(infer_request.uuid)
        if env is None:
            return {"done": True, "rollout_infos": {}}
        action = self.parse_action(response_choice.message.content)
        observation, reward, done, _ = await asyncio.to_thread(env.step, action)
        text = None if done else self.format_observation(observation)
        return await self._end_turn(infer_request.uuid, text, reward, done)

    def parse_action(self, text: str) -> dict[str, Any] | None:
        """Return the action of a reply: a JSON object, also in a fence, else
        the text as `message`."""
        fenced = re.fullmatch(r"```[^\n]*\n(.*?)\n?```", text.strip(), re.DOTALL)
        text = (fenced[1] if fenced else text).strip()
        try:
            action = json.loads(text)
        except ValueError:
            return {"message": text}
        return action if isinstance(action, dict) else {"message": str(action)}

    def format_observation(self, observation: Any) -> Any:
        """Return an observation as text for the model."""
        return json.dumps(observation, ensure_ascii=False, default=str)

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return OpenEnvWrapper(env_config)

    async def _close(self, env: Any) -> None:
        await asyncio.to_thread(env.close)


class SingleTurnScheduler(MultiTurnScheduler):
    """One reply, as ms-swift samples it without a scheduler: ids and
    messages are the response's."""

    async def run(self, infer_request: Request, request_config: Any, **kwargs: Any) -> Any:
        remove_response(infer_request.messages)
        return RolloutOutput(
            response=await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
        )


multi_turns: dict[str, Any] = {
    "math_tip_trick": MathTipsScheduler,
    "math_tip_trick_multi_turn": MathTipsMultiTurnScheduler,
    "gym_scheduler": GYMScheduler,
    "openenv_scheduler": OpenEnvScheduler,
    "thinking_tips_scheduler": ThinkingModelTipsScheduler,
    "single_turn": SingleTurnScheduler,
}
