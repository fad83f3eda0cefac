"""Our rollouts in SkyRL's trainer, as its generator.

SkyRL keeps its trainer, its engines and their weights; environments, token-exact contexts,
failures and records are ours::

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return TurnwrightGenerator(PLAY, cfg, tokenizer, inference_engine_client)
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from turnwright.engines import Generation, Request
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import UsageError
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
        self.episodes, self._client, self._tokenizer = episodes, inference_engine_client, tokenizer
        given = cfg.generator
        self._step_wise = bool(given.step_wise_trajectories)
        self._model_name = _policy_name(cfg)
        sampling = given.sampling_params
        names = ("temperature", "top_p", "top_k", "min_p", "logprobs")
        self._sampling = {
            name: getattr(sampling, name)
            for name in names
            if getattr(sampling, name, None) is not None
        }
        lengths = {
            "turns": given.max_turns,
            "turn_tokens": sampling.max_generate_length,
            "context": given.max_input_length + sampling.max_generate_length,
        }
        rollout = episodes.open(tokenizer, cfg.trainer.policy.model.path, groups=True, **lengths)
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
        prompts, extras = (
            input_batch["prompts"],
            input_batch.get("env_extras") or [{}] * len(input_batch["prompts"]),
        )
        metadata, names = input_batch.get("batch_metadata"), input_batch.get("trajectory_ids")
        phase = (
            "eval-skyrl" if metadata is not None and metadata.training_phase == "eval" else "train"
        )
        step = metadata.global_step if metadata is not None else 0
        episodes = []
        for number, (prompt, extra) in enumerate(zip(prompts, extras, strict=True)):
            row = {key: value for key, value in extra.items() if key not in ROUTED} | {
                "prompt": list(prompt)
            }
            task = self.episodes.task_of(row, f"prompt {number} of SkyRL's batch")
            episodes.append(self.episodes.episode(task, phase=phase, step=step))
        params = dict(input_batch.get("sampling_params") or self._sampling)
        sessions: set[str] = set()
        try:
            found = await self.episodes.play(
                episodes, self._sample(params, sessions), sampling_of(params)
            )
        finally:
            await asyncio.gather(*(self._client.finish_session(session) for session in sessions))
        filler = self._tokenizer.eos_token_id
        if self._step_wise:
            if names is None:
                raise UsageError(
                    "generator.step_wise_trajectories needs trajectory_ids in SkyRL's batch"
                )
            rows = [trained_rows(trajectory, filler) for trajectory in found]
        else:
            rows = [
                [single_row(one, filler, "SkyRL without generator.step_wise_trajectories")]
                for one in found
            ]
        return self._output(found, rows, names)

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
            sampling["logprobs"] = (
                sampling.get("logprobs") or 0
            )  # 0 is that of the sampled id alone
            if request.stop_text is not None:
                sampling |= {
                    "stop": list(request.stop_text.texts),
                    "include_stop_str_in_output": True,
                }
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
        rows: Sequence[Sequence[TrainedRow]],
        names: Sequence[Any] | None,
    ) -> dict[str, Any]:
        """Return a `GeneratorOutput`."""
        flat = [
            (trajectory, at, of, row)
            for trajectory, of in zip(trajectories, rows, strict=True)
            for at, row in enumerate(of)
        ]
        steps: dict[str, Any] = {"trajectory_ids": None, "is_last_step": None}
        if self._step_wise:
            assert names is not None
            steps["trajectory_ids"] = [
                name for name, of in zip(names, rows, strict=True) for _ in of
            ]
            steps["is_last_step"] = [at == len(of) - 1 for _, at, of, _ in flat]
        return {
            "prompt_token_ids": [row.prompt_ids for *_, row in flat],
            "response_ids": [row.response_ids for *_, row in flat],
            "rewards": [
                _rewards(trajectory, row, at == len(of) - 1, len(of))
                for trajectory, at, of, row in flat
            ],
            "loss_masks": [row.mask for *_, row in flat],
            "stop_reasons": [_stop_reason(trajectory) for trajectory, *_ in flat],
            "rollout_metrics": self._metrics(trajectories),
            "rollout_logprobs": [row.logprobs for *_, row in flat],
            "trajectory_generation_times": [trajectory.wall_s for trajectory, *_ in flat],
            "rollout_expert_indices": None,
            "env_metrics": [dict(trajectory.metrics) for trajectory, *_ in flat],
            **steps,
        }

    @staticmethod
    def _metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
        count = max(len(trajectories), 1)
        return episode_metrics(trajectories) | {
            "generate/avg_num_tokens": sum(one.sampled_tokens for one in trajectories) / count,
            "turnwright/without_reward": sum(one.reward is None for one in trajectories) / count,
        }


def _rewards(trajectory: Trajectory, row: TrainedRow, last: bool, rows: int) -> list[float]:
    """Return the rewards of a row; SkyRL reads those of a trajectory's last step alone, so
    that has all of them."""
    if rows == 1:
        return row.rewards
    total = trajectory.reward or 0.0
    return [*[0.0] * (len(row.response_ids) - 1), total if last else 0.0]


def _stop_reason(trajectory: Trajectory) -> str:
    return (
        "stop"
        if trajectory.stop is not None and trajectory.stop.status is Status.COMPLETED
        else "length"
    )


def _policy_name(cfg: Any) -> str | None:
    """Return the name by which SkyRL's servers have the policy."""
    try:
        utils = importlib.import_module("skyrl.backends.skyrl_train.inference_servers.utils")
    except ImportError:
        return None
    name: str = utils.resolve_policy_model_name(cfg)
    return name
