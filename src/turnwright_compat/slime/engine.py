"""The engine as slime's and Miles' user code calls it: a server's `/generate` by `post`, and the
state of the rollout.

An episode sets its `EngineServer` in `EPISODE`; user code reaches it by address (`server_of`) or
as the current one (`current_server`). `EngineServer.answer` samples, and keeps each call for the
check of masks. Requests of user code's own HTTP client come through `router.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turnwright.errors import EnvError
from turnwright.types import MediaPlacement
from turnwright_compat.sampled_rows import EngineCall, sampling_options
from turnwright_compat.slime.processor import ProcessorFace
from turnwright_compat.slime.router import LOOPBACK, RouterPort

HOST, PORT = "turnwright.invalid", 1
"""Address of the rollout servers where an episode has no port of its own; no name of that
domain is ever resolved."""
EPISODE: ContextVar[EngineServer | None] = ContextVar("turnwright_slime_episode", default=None)
"""The servers of the episode that runs."""
FINISH = {"stop": "stop", "length": "length", "abort": "abort"}


def server_of(url: str) -> EngineServer | None:
    """Return the engine that an address means; None for other addresses."""
    server = EPISODE.get()
    address = urlsplit(url)
    if server is None:
        return None
    own_addresses = (HOST, PORT), server.address
    return server if (address.hostname, address.port) in own_addresses else None


def current_server(what: str) -> EngineServer:
    """Return the servers of the episode that runs; raise `EnvError` outside of one."""
    server = EPISODE.get()
    if server is None:
        raise EnvError(f"{what} is used outside of an episode; make it in generate")
    return server


class GenerateState:
    """Tokenizer, sampling parameters and arguments of the rollout."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.semaphore = asyncio.Semaphore(1 << 16)  # the engine has its own limit
        self.aborted = False
        self.pendings: set[Any] = set()
        self.remaining_batch_size = 0
        self.dp_rank = 0

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return current_server("GenerateState").model.tokenizer

    @property
    def processor(self) -> ProcessorFace | None:
        """The model's processor; None for a text-only model."""
        return current_server("GenerateState").processor

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Parameters of each call."""
        return current_server("GenerateState").sampling_params()


class EngineServer:
    """The model of an episode, as a server with SGLang's `/generate`; keeps the calls in order."""

    def __init__(
        self, model: Any, skip_special_tokens: bool = False, base: Path | None = None
    ) -> None:
        self.model = model
        self._skips = skip_special_tokens
        self.base = base
        """The recipe's directory, around which the functions that `args` names are found."""
        self.address = HOST, PORT
        """Host and port, while the servers are open."""
        self._router: RouterPort | None = None
        self.calls: list[EngineCall] = []
        self._ids_by_text: dict[str, list[int]] = {}
        """Ids of contexts with their replies, by text."""

    def open(self) -> None:
        """Take a port of this machine, for user code that brings its own HTTP client.

        Without a free socket there is none, and `post` still reaches the engine.
        """
        router = RouterPort(self)
        with contextlib.suppress(OSError):
            self.address = LOOPBACK, router.open()
            self._router = router

    async def close(self) -> None:
        """Give the port back."""
        if self._router is not None:
            await self._router.close()

    @cached_property
    def processor(self) -> ProcessorFace | None:
        """The model's processor; None for a text-only model."""
        return ProcessorFace(self.model) if self.model.media_intake.has_vision else None

    def check_train_inputs(self, sample: Any) -> None:
        """Raise `EnvError` where a sample has `multimodal_train_inputs` other than those that
        the trainer computes."""
        if sample.multimodal_train_inputs is None:
            return

        tokens = list(sample.tokens)
        placements, end = self._images_of(tokens)
        if self.processor is None:
            fault = "a text-only model has none"
        else:
            fault = self.processor.check(sample.multimodal_train_inputs, placements, tokens[end:])
        if fault:
            raise EnvError(
                f"multimodal_train_inputs: {fault}; the trainer computes its own, so leave it None"
            )

    def _images_of(self, tokens: list[int]) -> tuple[list[MediaPlacement], int]:
        """Return the images of a sample up to its last reply, and the length up to there.

        The last reply is that of the longest call whose context and reply the sample begins with.
        """
        trajectory = self.model.trajectory
        placements: list[MediaPlacement] = []
        end = 0
        for call in self.calls:
            path = [*(call.context or ()), *call.reply.ids]
            if len(path) <= end or tokens[: len(path)] != path:
                continue
            turn = next(turn for turn in trajectory.turns if turn.reply is call.reply.message)
            placements = [
                placement
                for placement in trajectory.media_placements(turn.prompt)
                if placement.end <= turn.context
            ]
            end = len(path)
        return placements, end

    def sampling_params(self) -> dict[str, Any]:
        """Return what slime gives to a generate function, with the run's settings."""
        sampling = self.model.sampling
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": self.model.limits.turn_tokens,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": self._skips,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    async def answer(self, url: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request.

        Raises:
            EnvError: for another route than `/generate`, or a body without ids or text.
        """
        if urlsplit(url).path.rstrip("/") != "/generate":
            raise EnvError(f"{urlsplit(url).path}: the rollout servers have only /generate here")
        ids, text = payload.get("input_ids"), payload.get("text")
        if ids is None and not isinstance(text, str):
            raise EnvError("/generate needs input_ids or text")

        context = self._ids_of(str(text)) if ids is None else [int(token_id) for token_id in ids]
        params = payload.get("sampling_params") or {}
        options = sampling_options(params, payload.get("image_data"))
        started = time.monotonic()
        reply = await self.model.generate(context, **options)
        self.calls.append(EngineCall(context, reply))

        if params.get("skip_special_tokens", True):  # SGLang's default
            reply_text = self.model.tokenizer.decode(list(reply.ids), skip_special_tokens=True)
        else:
            reply_text = reply.raw_text
        if isinstance(text, str):
            self._ids_by_text[text + reply_text] = [*context, *reply.ids]

        meta_info = {
            "id": str(len(self.calls)),
            "finish_reason": {"type": FINISH.get(reply.finish, reply.finish)},
            "prompt_tokens": len(context),
            "completion_tokens": len(reply.ids),
            "cached_tokens": 0,
            "e2e_latency": time.monotonic() - started,
            "weight_version": "default",
        }
        if payload.get("return_logprob"):
            pairs = zip(reply.logprobs, reply.ids, strict=True)
            meta_info["output_token_logprobs"] = [
                [logprob, token_id, None] for logprob, token_id in pairs
            ]
        return {"text": reply_text, "output_ids": list(reply.ids), "meta_info": meta_info}

    def _ids_of(self, text: str) -> list[int]:
        """Return the ids of a text, those that were sampled where it begins with a known one."""
        beginnings = (known for known in self._ids_by_text if text.startswith(known))
        known_text = max(beginnings, key=len, default="")
        rest: list[int] = []
        if text != known_text:
            rest_text = text[len(known_text) :]
            rest = self.model.tokenizer(rest_text, add_special_tokens=False)["input_ids"]
        return [*self._ids_by_text.get(known_text, ()), *rest]
