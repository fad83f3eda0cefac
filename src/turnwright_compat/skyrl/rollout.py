"""Our rollouts in SkyRL's trainer, as its generator.

SkyRL keeps its trainer, its engines and their weights; environments, token-exact contexts,
failures and records are ours::

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TurnwrightGenerator(PLAY, cfg, tokenizer, inference_engine_client)

What all integrations share is `Episodes`, in `episodes.py`. Generators of a user, played by our
rollouts, are the other direction: `generator.py`.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from turnwright.engines import Generation, Request
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import UsageError
from turnwright.rollouts import EpisodeSpec
from turnwright.types import Status, Trajectory
from turnwright_compat.episodes import (
    Episodes,
    Sample,
    TrainedRow,
    episode_metrics,
    make_generation,
    sampling_of,
    single_row,
    trained_rows,
)

_BASE: Any = import_foreign("skyrl.train.generators.base")
ROUTED = ("env_class", "max_turns")
"""Columns that SkyRL adds to each row."""


class SkyRLEpisodes(Episodes):
    """An environment for SkyRL's trainer."""

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Return rows of SkyRL's dataset."""
        return [{**row, "env_class": "turnwright"} for row in super().rows(split)]


class TurnwrightGenerator(_BASE.GeneratorInterface):  # type: ignore[misc]
    """Generator of SkyRL that plays an environment over SkyRL's inference engines.

    `loss_masks` is 1 on sampled ids only, `rewards` are by token.
    """

    def __init__(
        self, episodes: SkyRLEpisodes, cfg: Any, tokenizer: Any, inference_engine_client: Any
    ) -> None:
        """Prepare a generator; the arguments after `episodes` are those of
        `BasePPOExp.get_generator`."""
        generator_cfg = cfg.generator
        sampling = generator_cfg.sampling_params
        self.episodes = episodes
        self._client = inference_engine_client
        self._tokenizer = tokenizer
        self._step_wise = bool(generator_cfg.step_wise_trajectories)
        self._model_name = _policy_name(cfg)

        self._sampling: dict[str, Any] = {}
        """Sampling parameters of a batch that has none."""
        for name in ("temperature", "top_p", "top_k", "min_p", "logprobs"):
            value = getattr(sampling, name, None)
            if value is not None:
                self._sampling[name] = value

        rollout = episodes.open(
            tokenizer,
            cfg.trainer.policy.model.path,
            groups=True,
            turns=generator_cfg.max_turns,
            turn_tokens=sampling.max_generate_length,
            context=generator_cfg.max_input_length + sampling.max_generate_length,
        )
        if rollout.pixels is not None:
            raise UsageError(
                "images in SkyRL: its engines take them as features of its own renderer; train "
                "with turnwright.train"
            )

    async def generate(
        self, input_batch: Mapping[str, Any], disable_tqdm: bool = False
    ) -> dict[str, Any]:
        """Play an episode for each prompt, in their order.

        Raises:
            UsageError: for an episode of several rows unless
                `generator.step_wise_trajectories` is set.
        """
        episodes = self._episodes_of(input_batch)
        params = dict(input_batch.get("sampling_params") or self._sampling)
        sessions: set[str] = set()
        try:
            trajectories = await self.episodes.play(
                episodes, self._sample(params, sessions), sampling_of(params)
            )
        finally:
            await asyncio.gather(*(self._client.finish_session(session) for session in sessions))

        trajectory_ids = input_batch.get("trajectory_ids")
        filler = self._tokenizer.eos_token_id
        rows_of_each: list[list[TrainedRow]] = []
        if self._step_wise:
            if trajectory_ids is None:
                raise UsageError(
                    "generator.step_wise_trajectories needs trajectory_ids in SkyRL's batch"
                )
            rows_of_each = [trained_rows(trajectory, filler) for trajectory in trajectories]
        else:
            trainer = "SkyRL without generator.step_wise_trajectories"
            for trajectory in trajectories:
                rows_of_each.append([single_row(trajectory, filler, trainer)])
        return self._output(trajectories, rows_of_each, trajectory_ids)

    def _episodes_of(self, input_batch: Mapping[str, Any]) -> list[EpisodeSpec]:
        """Return the episodes of a batch, one for each prompt."""
        prompts = input_batch["prompts"]
        extras = input_batch.get("env_extras") or [{}] * len(prompts)
        metadata = input_batch.get("batch_metadata")
        phase, step = "train", 0
        if metadata is not None:
            step = metadata.global_step
            if metadata.training_phase == "eval":
                phase = "eval-skyrl"

        episodes = []
        for number, (prompt, extra) in enumerate(zip(prompts, extras, strict=True)):
            row = {key: value for key, value in extra.items() if key not in ROUTED}
            row["prompt"] = list(prompt)
            task = self.episodes.task_of(row, f"prompt {number} of SkyRL's batch")
            episodes.append(self.episodes.episode(task, phase=phase, step=step))
        return episodes

    def _sample(self, params: Mapping[str, Any], sessions: set[str]) -> Sample:
        """Return the function that asks SkyRL's engine client for one reply, and keeps the
        sessions that it opened."""

        async def sample(request: Request) -> Generation:
            sessions.add(request.session)
            sampling = {
                **params,
                "max_tokens": request.max_tokens,
                "stop_token_ids": sorted(request.stop_ids),
            }
            # 0 asks for the logprob of the sampled id alone.
            sampling["logprobs"] = sampling.get("logprobs") or 0
            if request.stop_text is not None:
                sampling["stop"] = list(request.stop_text.texts)
                sampling["include_stop_str_in_output"] = True
            else:
                sampling.pop("stop", None)

            batch = {
                "prompts": None,
                "prompt_token_ids": [list(request.ids)],
                "sampling_params": sampling,
                "session_ids": [request.session],
            }
            reply = await self._client.generate(batch, model=self._model_name)
            logprobs = reply.get("response_logprobs")
            return make_generation(
                request,
                reply["response_ids"][0],
                None if logprobs is None else logprobs[0],
                reply["stop_reasons"][0],
                needs="generator.sampling_params.logprobs = 1",
            )

        return sample

    def _output(
        self,
        trajectories: Sequence[Trajectory],
        rows_of_each: Sequence[Sequence[TrainedRow]],
        trajectory_ids: Sequence[Any] | None,
    ) -> dict[str, Any]:
        """Return a `GeneratorOutput`, whose columns have an entry for each row of a trajectory."""
        rows: list[TrainedRow] = []
        trajectory_of_row: list[Trajectory] = []
        is_last_row: list[bool] = []
        rewards: list[list[float]] = []
        for trajectory, own_rows in zip(trajectories, rows_of_each, strict=True):
            for index, row in enumerate(own_rows):
                is_last = index == len(own_rows) - 1
                rows.append(row)
                trajectory_of_row.append(trajectory)
                is_last_row.append(is_last)
                rewards.append(_rewards(trajectory, row, is_last, len(own_rows)))

        step_ids = None
        if self._step_wise:
            assert trajectory_ids is not None
            step_ids = [
                trajectory_id
                for trajectory_id, own_rows in zip(trajectory_ids, rows_of_each, strict=True)
                for _ in own_rows
            ]
        return {
            "prompt_token_ids": [row.prompt_ids for row in rows],
            "response_ids": [row.response_ids for row in rows],
            "rewards": rewards,
            "loss_masks": [row.mask for row in rows],
            "stop_reasons": [_stop_reason(trajectory) for trajectory in trajectory_of_row],
            "rollout_metrics": self._metrics(trajectories),
            "rollout_logprobs": [row.logprobs for row in rows],
            "trajectory_generation_times": [trajectory.wall_s for trajectory in trajectory_of_row],
            "rollout_expert_indices": None,
            "env_metrics": [dict(trajectory.metrics) for trajectory in trajectory_of_row],
            "trajectory_ids": step_ids,
            "is_last_step": is_last_row if self._step_wise else None,
        }

    @staticmethod
    def _metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        count = max(len(trajectories), 1)
        tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
        without_reward = sum(trajectory.reward is None for trajectory in trajectories)
        return episode_metrics(trajectories) | {
            "generate/avg_num_tokens": tokens / count,
            "turnwright/without_reward": without_reward / count,
        }


def _rewards(trajectory: Trajectory, row: TrainedRow, is_last: bool, row_count: int) -> list[float]:
    """Return the rewards of a row; SkyRL reads those of a trajectory's last step alone, so
    that has all of them."""
    if row_count == 1:
        return row.rewards
    total = trajectory.reward or 0.0
    return [*[0.0] * (len(row.response_ids) - 1), total if is_last else 0.0]


def _stop_reason(trajectory: Trajectory) -> str:
    is_complete = trajectory.stop is not None and trajectory.stop.status is Status.COMPLETED
    return "stop" if is_complete else "length"


def _policy_name(cfg: Any) -> str | None:
    """Return the name by which SkyRL's servers have the policy."""
    try:
        utils = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.utils")
    except ImportError:
        return None
    name: str = utils.resolve_policy_model_name(cfg)
    return name
