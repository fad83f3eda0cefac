"""Any OpenAI-style chat endpoint as an engine for evaluation: text in, text out, so nothing that it says can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.engines.base import Generation, Request
from turnwise.engines.remote.base import RemoteEngine, ResponseErrors, field_of, only_choice
from turnwise.errors import EngineError, NotTrainable

FINISH = {"stop": "stop", "length": "length"}


class ChatEngine(RemoteEngine):
    """A model behind `URL/chat/completions`, for evaluation, judges and simulated users.

    It shows messages to the endpoint and takes text back, which the renderer encodes: those ids were not sampled as they
    stand, and have no logprobs. So every id of its replies is untrained, with the reason `no_logprob`, and asked to take a
    trainer's weights it raises `NotTrainable`.
    """

    kind = "chat endpoint"

    def __init__(self, url: str, model: str, **options: Any) -> None:
        """
        Args:
            url: of the API, up to and including its version: `https://host/v1`.
            model: the name that the endpoint knows.
            options: as of `RemoteEngine`.

        Raises:
            ConfigError: for a setting that cannot be.
        """
        super().__init__(url, model=model, **options | {"missing_logprobs": "mask"})

    async def _look(self) -> None:
        """A chat endpoint says nothing of itself."""

    async def check_health(self, seconds: float) -> None:
        await self.http.alive("/models", seconds)

    async def generate(self, request: Request) -> Generation:
        if self.renderer is None:
            raise EngineError(
                f"{self.display_name}: a chat endpoint needs a renderer: pass renderer= or use it through a rollout"
            )
        if not request.messages:
            raise EngineError(f"{self.display_name}: a chat endpoint reads messages, and this call has ids alone")
        messages = [_plain(message.to_dict(), self.display_name) for message in request.messages]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
        }
        self.counts["requests"] += 1
        raw = await self.http.post("/chat/completions", body, self._seconds(request))
        breach = ResponseErrors(self.display_name)
        choice = only_choice(raw, breach)
        message = field_of(choice, "message", breach)
        if not isinstance(message, dict):
            raise breach("choices.0.message", f"is {message!r:.80}, no object")
        if message.get("tool_calls"):
            raise EngineError(
                f"{self.display_name} answered with tool calls of its own; environments with tools need an engine that "
                f"gives ids"
            )
        text = message.get("content")
        if not isinstance(text, str):
            raise breach("choices.0.message.content", f"is {text!r}, no text")
        if FINISH.get(str(choice.get("finish_reason"))) is None:
            raise breach("choices.0.finish_reason", f"is {choice.get('finish_reason')!r}, which is not known")
        ids = list(self.renderer.encode_reply(text))[: request.max_tokens]
        end = request.stop_text.first_completion(ids) if request.stop_text is not None else 0
        ids = ids[:end] if end else ids
        if choice["finish_reason"] == "length":
            while ids and ids[-1] in request.stop_ids:
                ids.pop()
        if not ids:
            raise breach("choices.0.message.content", "is empty; a model samples at least one id")
        stopped = bool(end) or ids[-1] in request.stop_ids
        made = Generation(ids, [None] * len(ids), "stop" if stopped else "length", self.version, missing_logprobs="mask")
        self._count(made, 0, len(request.ids))
        return made

    async def score(self, ids: Sequence[int]) -> list[float]:
        raise self._refusal()

    async def update(self, weights: Any, version: int) -> str:
        """Refused.

        Raises:
            NotTrainable: always.
        """
        raise self._refusal()

    async def _load(self, directory: Path, version: int) -> None:
        raise self._refusal()

    def _refusal(self) -> NotTrainable:
        return NotTrainable(
            f"{self.display_name} cannot be trained with: it answers with text, and training needs the ids that were "
            f"sampled and the "
            "logprob of each; use a vLLM, SGLang or llama.cpp server, or the local engine, and keep this one for evaluation"
        )


def _plain(row: dict[str, Any], who: str) -> dict[str, Any]:
    content = row.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise EngineError(f"{who}: images are not sent to chat endpoints; use a vLLM or SGLang server")
        row["content"] = "".join(part["text"] for part in content)
    return row
