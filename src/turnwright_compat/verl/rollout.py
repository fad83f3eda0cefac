"""Our rollouts in verl's trainers, as an agent loop.

verl keeps its trainer, its servers and their weights; environments, token-exact contexts, failures
and records are ours. Name the loop in the file of
`actor_rollout_ref.rollout.agent.agent_loop_config_path`::

    - name: turnwright
      _target_: turnwright_compat.verl.rollout.TurnwrightAgentLoop
      env: hop
      n_tasks: 4096

What all integrations share is `Episodes`, in `episodes.py`. Loops of a user, played by our
rollouts, are the other direction: `agent_loop.py`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from turnwright.engines import Generation, Request
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import UsageError
from turnwright.types import Task, Trajectory
from turnwright_compat.episodes import (
    Episodes,
    TrainedRow,
    make_generation,
    pictures,
    sampling_of,
    single_row,
)

_LOOP: Any = import_foreign("verl.experimental.agent_loop.agent_loop")
ADDED = (
    "agent_name",
    "index",
    "tools_kwargs",
    "interaction_kwargs",
    "need_tools_kwargs",
    "multi_modal_data",
)
"""Columns that verl adds to each row."""


class VerlEpisodes(Episodes):
    """An environment for verl's trainers."""

    def rows(self, split: str = "train", agent_name: str = "turnwright") -> list[dict[str, Any]]:
        """Return rows of verl's dataset; `agent_name` is the loop's name in
        the file of agent loops."""
        added = {
            "data_source": self.spec.name,
            "agent_name": agent_name,
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        return [
            {**row, **added, "extra_info": {"index": index}}
            for index, row in enumerate(super().rows(split))
        ]


@functools.cache
def _shared(settings_json: str) -> VerlEpisodes:
    """Return the environment of all loops of a process: verl makes a loop for each episode."""
    return VerlEpisodes(**json.loads(settings_json))


class TurnwrightAgentLoop(_LOOP.AgentLoopBase):  # type: ignore[misc]
    """Agent loop of verl that plays one episode of an environment over verl's servers.

    `response_mask` is 1 on sampled ids only; `reward_score` is the episode's reward, which
    verl puts at the last id.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        *,
        env: Any = None,
        episodes: VerlEpisodes | None = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        hf_model_type: str | None = None,
        tools: Any = None,
        name: str = "",
        **settings: Any,
    ) -> None:
        """Prepare a loop.

        Args:
            env: environment by name, with `settings` as of `VerlEpisodes`: what the
                file of agent loops has.
            episodes: the environment, from a subclass of your own.

        The others are verl's, `name` that of the loop in the file; verl's own
        builder of ids is not made.
        """
        if (env is None) == (episodes is None):
            raise UsageError(
                "the agent loop needs an environment: write env: NAME in the file of agent loops"
            )
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.rollout_config = rollout = self.config.actor_rollout_ref.rollout

        if episodes is None:
            of_file = {"env": env, **settings}
            plain = {key: _plain(value) for key, value in of_file.items()}
            episodes = _shared(json.dumps(plain, sort_keys=True))
        self.episodes = episodes

        total = rollout.prompt_length + rollout.response_length
        model = self.config.actor_rollout_ref.model
        episodes.open(
            processor if processor is not None else tokenizer,
            model.get("local_path") or model.get("path"),
            turn_tokens=rollout.response_length,
            episode_tokens=rollout.response_length,
            context=min(total, rollout.get("max_model_len") or total),
        )

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        """Play the episode of a row.

        Raises:
            UsageError: for an episode of several rows, or one that is longer than verl's tensors.
        """
        began = time.monotonic()
        task = self._task(kwargs)
        extra_fields: dict[str, Any] = {}
        deterministic = self.rollout_config.get("full_determinism", False)
        session = f"det-{int(priority)}" if deterministic else uuid4().hex
        sample = functools.partial(
            self._sample, sampling_params, int(priority), session, extra_fields
        )
        (trajectory,) = await self.episodes.play(
            [self.episodes.episode(task)], sample, sampling_of(sampling_params)
        )

        row = single_row(trajectory, self.tokenizer.eos_token_id, "verl")
        row = row.cut(self.rollout_config.response_length)
        if len(row.prompt_ids) > self.rollout_config.prompt_length:
            raise UsageError(
                f"{trajectory.key}: a prompt of {len(row.prompt_ids)} ids, and "
                f"data.max_prompt_length is {self.rollout_config.prompt_length}; raise it, or make "
                "the environment's opening shorter"
            )
        return self._output(trajectory, row, extra_fields, time.monotonic() - began)

    def _task(self, row: Mapping[str, Any]) -> Task:
        """Return the task of a row, without the columns that verl added to it."""
        columns = {key: value for key, value in row.items() if key not in (*ADDED, "raw_prompt")}
        columns["prompt"] = list(row["raw_prompt"])
        return self.episodes.task_of(columns, "a row of verl's dataset")

    async def _sample(
        self,
        params: Mapping[str, Any],
        priority: int,
        session: str,
        extra_fields: dict[str, Any],
        request: Request,
    ) -> Generation:
        """Ask verl's servers for one reply; what they return besides goes into `extra_fields`."""
        sampling = {
            **params,
            "logprobs": True,
            "max_tokens": request.max_tokens,
            "stop_token_ids": sorted(request.stop_ids),
        }
        if request.stop_text is not None:
            sampling["stop"] = list(request.stop_text.texts)
            sampling["include_stop_str_in_output"] = True

        reply = await self.server_manager.generate(
            request_id=session,
            prompt_ids=list(request.ids),
            sampling_params=sampling,
            image_data=pictures(request.media, self.episodes.media, "verl") or None,
            **({"priority": priority} if priority else {}),
        )

        # The episode's oldest weights are those of its first reply.
        returned_fields = dict(reply.extra_fields)
        if "min_global_steps" in extra_fields:
            returned_fields["min_global_steps"] = extra_fields["min_global_steps"]
        extra_fields.update(returned_fields)
        return make_generation(
            request,
            list(reply.token_ids),
            reply.log_probs,
            "abort" if reply.stop_reason in ("aborted", "abort") else None,
            needs="actor_rollout_ref.rollout.calculate_log_probs=True",
        )

    def _output(
        self,
        trajectory: Trajectory,
        row: TrainedRow,
        extra_fields: Mapping[str, Any],
        seconds: float,
    ) -> Any:
        """Return an `AgentLoopOutput`."""
        images = pictures(row.media, self.episodes.media, "verl")
        sampling_s = sum(turn.generate_s for turn in trajectory.turns)
        metrics = _LOOP.AgentLoopMetrics(
            generate_sequences=sampling_s, tool_calls=max(seconds - sampling_s, 0.0)
        )
        own_fields = {
            "turn_scores": [turn.reward for turn in trajectory.turns if turn.reward is not None],
            "tool_rewards": [],
            "turnwright_stop": str(trajectory.stop.value) if trajectory.stop else "",
        }
        return _LOOP.AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.mask,
            response_logprobs=row.logprobs,
            multi_modal_data={"images": images} if images else {},
            reward_score=trajectory.reward or 0.0,
            num_turns=2 * len(trajectory.turns),
            metrics=metrics,
            extra_fields={**extra_fields, **own_fields},
        )


def _plain(value: Any) -> Any:
    """Return JSON data of a value of verl's configuration."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    try:
        return [_plain(inner) for inner in value]
    except TypeError:
        raise UsageError(
            f"the agent loop's settings are JSON data, not {type(value).__name__}"
        ) from None
