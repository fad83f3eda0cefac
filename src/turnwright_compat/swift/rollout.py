"""Our rollouts in ms-swift's GRPO trainer, as a scheduler of its rollout server.

ms-swift keeps its trainer, its engine and its weights; environments, failures and records are ours.
In a file of `swift rollout --external_plugins FILE --multi_turn_scheduler turnwright`, with
`--use_gym_env true` for the trainer::

    from swift.rollout.multi_turn import multi_turns

    multi_turns["turnwright"] = make_scheduler(SwiftEpisodes("hop", n_tasks=4096))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwright.engines import Generation, Request
from turnwright.envs.user_imports import import_foreign
from turnwright.errors import BackendContractError, UsageError
from turnwright.types import Message, Task, Trajectory
from turnwright_compat.episodes import (
    TASK,
    Episodes,
    make_generation,
    prompt_of,
    sampling_of,
    single_row,
)

PLACEHOLDERS = ("<image>", "<video>", "<audio>")
"""Texts that ms-swift's templates replace by media."""


class SwiftEpisodes(Episodes):
    """An environment for ms-swift's trainer."""

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """Return rows of ms-swift's dataset, whose columns reach the server with
        `--vllm_server_pass_dataset true`."""
        tasks = self.tasks_of(split)
        return [{"messages": prompt_of(task), TASK: task_id} for task_id, task in tasks.items()]


def make_scheduler(episodes: SwiftEpisodes) -> type:
    """Return a `MultiTurnScheduler` class that plays an environment.

    Only its `run` is ours, so it needs the rollout server.
    """
    base: Any = import_foreign("swift.rollout.multi_turn").MultiTurnScheduler

    class TurnwrightScheduler(base):  # type: ignore[misc]
        """Scheduler of ms-swift that plays one episode for each request."""

        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            """Play the episode of a request.

            Raises:
                EngineError: where ms-swift's template renders other ids than ours.
                UsageError: for an episode of several rows, or with images.
            """
            engine = self.infer_engine
            rollout = episodes.open(
                self.tokenizer,
                engine.model_dir,
                turns=self.max_turns,
                turn_tokens=request_config.max_tokens,
            )
            if rollout.pixels is not None:
                raise UsageError("images in ms-swift: not supported; train with turnwright.train")

            config = replace(request_config, logprobs=True, return_details=True)
            chat = _Chat(engine, config, infer_request, kwargs)
            params = {
                name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")
            }
            episode = episodes.episode(_task_of(episodes, infer_request))
            (trajectory,) = await episodes.play([episode], chat.sample, sampling_of(params))
            return _output(trajectory, chat, self.tokenizer)

    return TurnwrightScheduler


def _task_of(episodes: SwiftEpisodes, request: Any) -> Task:
    """Return the task of a request: the one that its columns name, or one of its messages without
    their reference answer."""
    row = dict(request.data_dict or {})
    messages = list(request.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()

    columns = {TASK: row[TASK]} if TASK in row else {**row, "messages": messages}
    return episodes.task_of(columns, "a request of ms-swift")


@dataclass(slots=True)
class _Chat:
    """One episode as ms-swift's engine sees it: messages, with the ids of the replies
    in place of their text."""

    engine: Any
    config: Any
    request: Any
    arguments: Mapping[str, Any]
    replies: dict[int, list[int]] = field(default_factory=dict)
    """Ids by position of the message."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of the last call, then its reply."""
    response: Any = None

    async def sample(self, request: Request) -> Generation:
        """Ask ms-swift's engine for one reply, and check the ids of its prompt."""
        if request.reply_position:
            raise UsageError("ms-swift's engine aborted a reply, and cannot go on with it")

        messages = [
            _message(message, self.replies.get(position))
            for position, message in enumerate(request.messages)
        ]
        stop = [] if request.stop_text is None else list(request.stop_text.texts)
        config = replace(self.config, max_tokens=request.max_tokens, stop=stop)
        infer_request = replace(self.request, messages=messages, images=[])
        response = await self.engine.infer_async(infer_request, config, **self.arguments)
        _check_prompt(list(request.ids), response.prompt_token_ids)

        (choice,) = response.choices
        logprobs = None
        if choice.logprobs is not None:
            logprobs = [entry["logprob"] for entry in choice.logprobs["content"]]
        ids = list(choice.token_ids or ())
        generation = make_generation(
            request, ids, logprobs, choice.finish_reason, needs="logprobs = true of the request"
        )

        self.replies[len(messages)] = ids
        reply = {"role": "assistant", "content": choice.message.content or ""}
        self.messages = [*messages, reply]
        self.response = response
        return generation


def _message(message: Message, ids: list[int] | None) -> dict[str, Any]:
    """Return a message as ms-swift takes it; a reply of this episode is its ids."""
    if ids is not None:
        return {"role": "assistant", "content": list(ids)}
    for text in PLACEHOLDERS:
        if text in message.text:
            raise UsageError(
                f"a message contains {text!r}, which ms-swift's template would take for an image, "
                "video or audio"
            )
    return {"role": str(message.role), "content": message.text}


def _check_prompt(ours: Sequence[int], theirs: Sequence[int] | None) -> None:
    if theirs is None:
        raise BackendContractError(
            "ms-swift's engine returned no prompt_token_ids; it must answer return_details = true"
        )
    if list(theirs) == list(ours):
        return
    at = next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    raise BackendContractError(
        f"ms-swift's template renders {len(theirs)} ids and the model's own chat template "
        f"{len(ours)}, which differ from id {at} on ({theirs[at : at + 6]} and "
        f"{ours[at : at + 6]}); choose the --template that renders as the model's does, or give "
        "SwiftEpisodes(renderer=...) with the chat template that ms-swift uses"
    )


def _output(trajectory: Trajectory, chat: _Chat, tokenizer: Any) -> Any:
    """Return a `RolloutOutput`."""
    protocol: Any = import_foreign("swift.infer_engine.protocol")
    row = single_row(trajectory, tokenizer.eos_token_id, "ms-swift")
    if any(turn.inserted is not None for turn in trajectory.turns):
        raise UsageError(
            'history = "inline" joins replies into one message, and ms-swift has one reply for '
            "each message"
        )

    suffix_parts = chat.engine.template.template_meta.suffix
    suffix = "".join(part for part in suffix_parts if isinstance(part, str))
    end_ids = list(tokenizer.encode(suffix, add_special_tokens=False))
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    logprobs: list[list[float]] = []
    for turn in trajectory.turns:
        reply = [token_id for span in turn.spans for token_id in trajectory.spans[span].ids]
        start = turn.context - len(row.prompt_ids)
        end = start + len(reply)
        mask = row.mask[start:end]
        if end_ids and any(mask) and row.response_ids[end : end + len(end_ids)] == end_ids:
            raise UsageError(
                f"{trajectory.key}: a reply without an end token is followed by another turn, and "
                "ms-swift trains the one that its template appends; use limits.on_turn_length = "
                '"stop", and no stop texts'
            )
        ids.append(reply)
        masks.append(mask)
        logprobs.append(
            [
                logprob
                for logprob, trained in zip(row.logprobs[start:], mask, strict=False)
                if trained
            ]
        )

    messages = [
        {**message, "content": _text(message["content"], tokenizer)} for message in chat.messages
    ]
    if not ids:  # it failed before the first reply
        ids, masks, logprobs = [row.response_ids], [row.mask], []
        messages = [_message(message, None) for message in trajectory.task.messages]
        messages.append({"role": "assistant", "content": ""})
    return protocol.RolloutOutput(
        response=chat.response or _empty_response(protocol, row.response_ids),
        messages=messages,
        response_token_ids=ids,
        response_loss_mask=masks,
        rollout_infos={
            "num_turns": len(trajectory.turns),
            "total_reward": trajectory.reward or 0.0,
            "turnwright_stop": str(trajectory.stop.value) if trajectory.stop else "",
            "turnwright_reward": trajectory.reward,
        },
        rollout_logprobs=logprobs,
    )


def _text(content: Any, tokenizer: Any) -> str:
    if isinstance(content, str):
        return content
    return str(tokenizer.decode(content, skip_special_tokens=True))


def _empty_response(protocol: Any, ids: list[int]) -> Any:
    choice = protocol.ChatCompletionResponseChoice(
        index=0,
        message=protocol.ChatMessage(role="assistant", content=""),
        finish_reason="stop",
        token_ids=ids,
    )
    return protocol.ChatCompletionResponse(
        model="", choices=[choice], usage=protocol.UsageInfo(0, 0, 0)
    )
