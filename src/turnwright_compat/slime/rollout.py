"""Our rollouts in slime's and Miles' trainers, as their custom generate function.

Both keep their trainer, their SGLang servers and their weights; environments, token-exact
contexts, failures and records are ours. In a module that
`--custom-generate-function-path module.generate` names::

    episodes = SlimeEpisodes("hop", n_tasks=4096)
    generate = make_generate(episodes)

What all integrations share is `Episodes`, in `episodes.py`. Generate functions of a user, played
by our rollouts, are the other direction: `adapter.py`.
"""

from __future__ import annotations

import copy
import importlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnwright.engines import Generation, Request
from turnwright.envs.user_imports import public_name
from turnwright.errors import BackendContractError, UsageError
from turnwright.types import Status, Task, Trajectory
from turnwright_compat.episodes import (
    TASK,
    Episodes,
    Sample,
    TrainedRow,
    images_of,
    make_generation,
    prompt_of,
    sampling_of,
    single_row,
    trained_rows,
)

ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which SGLang's router keeps a session on one worker."""
LOGPROBS = "return_logprob, which SGLang's servers have by default"
Post = Callable[..., Awaitable[Mapping[str, Any]]]


class SlimeEpisodes(Episodes):
    """An environment for slime's and Miles' trainers."""

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Return rows of slime's `.jsonl` dataset, for
        `--input-key prompt --label-key label --metadata-key metadata`."""
        return [
            {"prompt": prompt_of(task), "label": "", "metadata": {TASK: task_id}}
            for task_id, task in self.tasks_of(split).items()
        ]


def make_generate(
    episodes: SlimeEpisodes, *, fan_out: bool = False, post: Post | None = None
) -> Callable[..., Any]:
    """Return a custom generate function that plays an environment.

    Args:
        fan_out: whether an episode of several rows becomes a list of samples, each with the
            episode's reward, instead of an error. slime then normalizes rewards over the batch
            instead of each group, unless you post-process them yourself.
        post: `post(url, payload, headers=...)` for the servers' JSON; by default the one of the
            trainer's `utils.http_utils`.
    """

    async def generate(
        args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        """Play the episode of a sample; `args` and the others are the trainer's."""
        settings = vars(args)
        response_length = settings.get("rollout_max_response_len")
        episodes.open(
            _tokenizer_of(settings, episodes),
            settings.get("hf_checkpoint"),
            turn_tokens=response_length,
            episode_tokens=response_length,
            context=settings.get("rollout_max_context_len"),
        )

        versions: list[Any] = []
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        ask = _sampler(url, dict(sampling_params), post or _post_of(sample), versions, episodes)
        phase = "eval-slime" if evaluation else "train"
        episode = episodes.episode(_task_of(episodes, sample), phase=phase)
        (trajectory,) = await episodes.play([episode], ask, sampling_of(sampling_params))

        filler = min(episodes.renderer.stop_ids) if episodes.renderer is not None else 0
        if not fan_out:
            row = single_row(trajectory, filler, "slime without fan_out=True")
            return _fill(sample, row, trajectory, settings, versions, episodes)

        # Rows of one episode have one rollout_id.
        rows = trained_rows(trajectory, filler)
        rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        samples = [sample, *(copy.deepcopy(sample) for _ in rows[1:])]
        for row_sample, row in zip(samples, rows, strict=True):
            _fill(row_sample, row, trajectory, settings, versions, episodes, rollout_id=rollout_id)
        return samples

    return generate


def _tokenizer_of(settings: Mapping[str, Any], episodes: SlimeEpisodes) -> Any:
    """Return the tokenizer of the trainer's model; None where the renderer is known."""
    if episodes.renderer is not None:
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        settings["hf_checkpoint"], trust_remote_code=bool(settings.get("trust_remote_code"))
    )


def _task_of(episodes: SlimeEpisodes, sample: Any) -> Task:
    """Return the task of a sample: the one that its metadata names, or one of its
    prompt, label and metadata."""
    metadata = dict(sample.metadata or {})
    if TASK in metadata:
        row = {TASK: metadata[TASK]}
    else:
        row = {**metadata, "prompt": sample.prompt, "label": sample.label}
    return episodes.task_of(row, f"sample {sample.index}")


def _post_of(sample: Any) -> Post:
    """Return the function with which the package of a sample speaks to its servers."""
    package = public_name(type(sample).__module__).partition(".")[0]
    try:
        post: Post = importlib.import_module(f"{package}.utils.http_utils").post
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{package}.utils.http_utils has no post ({error}); give make_generate(..., post=...)"
        ) from error
    return post


def _sampler(
    url: str, params: dict[str, Any], post: Post, versions: list[Any], episodes: SlimeEpisodes
) -> Sample:
    """Return the function that asks SGLang for one reply; it keeps the names of the weights."""
    for key in ("custom_params", "max_new_tokens", "stop", "stop_token_ids"):
        params.pop(key, None)  # ours, or values of each id that we do not pass on

    async def ask(request: Request) -> Generation:
        sampling = {
            **params,
            "max_new_tokens": request.max_tokens,
            "stop_token_ids": sorted(request.stop_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if request.stop_text is not None:
            sampling["stop"] = list(request.stop_text.texts)

        payload: dict[str, Any] = {
            "input_ids": list(request.ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if request.media:
            files = (episodes.media.png_bytes(image) for image in images_of(request.media, "slime"))
            payload["image_data"] = [
                f"data:image/png;base64,{b64encode(file).decode()}" for file in files
            ]

        answer = await post(url, payload, headers={ROUTING_KEY: request.session})
        meta_info = answer["meta_info"]
        rows = meta_info.get("output_token_logprobs")
        if rows is None:
            raise BackendContractError(
                f"the servers returned no output_token_logprobs; set {LOGPROBS}"
            )
        if "weight_version" in meta_info:
            versions.append(meta_info["weight_version"])
        return make_generation(
            request,
            [row[1] for row in rows],
            [row[0] for row in rows],
            meta_info["finish_reason"]["type"],
            needs=LOGPROBS,
        )

    return ask


def _fill(
    sample: Any,
    row: TrainedRow,
    trajectory: Trajectory,
    settings: Mapping[str, Any],
    versions: list[Any],
    episodes: SlimeEpisodes,
    **own: Any,
) -> Any:
    """Write a row into a sample, and values of its own; return the sample."""
    reward = sum(row.rewards) if trajectory.row_rewards else trajectory.reward or 0.0
    # slime reads the reward of each name that it was started with.
    reward_keys = [
        settings[name] for name in ("reward_key", "eval_reward_key") if settings.get(name)
    ]

    response = ""
    if episodes.renderer is not None:
        response = episodes.renderer.decode(row.response_ids)

    status = trajectory.stop.status if trajectory.stop is not None else Status.FAILED
    if trajectory.reward is None:
        status = Status.FAILED

    values: dict[str, Any] = {
        "tokens": row.ids,
        "response": response,
        "response_length": len(row.response_ids),
        "loss_mask": row.mask,
        "rollout_log_probs": row.logprobs,
        "reward": dict.fromkeys(reward_keys, reward) if reward_keys else reward,
        "status": type(sample).Status(str(status)),
        "weight_versions": [*(sample.weight_versions or ()), *versions],
        "metadata": {**(sample.metadata or {}), "turnwright": _summary(trajectory)},
        "remove_sample": trajectory.reward is None,
        **own,
    }
    if row.media:
        values["multimodal_train_inputs"] = _train_inputs(row, episodes)
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


def _summary(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "turns": len(trajectory.turns),
        "stop": "" if trajectory.stop is None else str(trajectory.stop.value),
        "rewards": [turn.reward for turn in trajectory.turns],
    }


def _train_inputs(row: TrainedRow, episodes: SlimeEpisodes) -> dict[str, Any]:
    """Return the model's inputs of a row's images, by the names of its processor."""
    import torch

    assert episodes.pixels is not None
    arrays = episodes.pixels.merged([block.media for block in row.media])
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
