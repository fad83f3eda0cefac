"""The engine as slime's and Miles' user code calls it: a server's `/generate` by `post`, and the
state of the rollout."""

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
    server, asked = EPISODE.get(), urlsplit(url)
    if server is None:
        return None
    own = (HOST, PORT), server.address
    return server if (asked.hostname, asked.port) in own else None


def current_server(what: str) -> EngineServer:
    """Return the servers of the episode that runs; raise `EnvError` outside of one."""
    if (found := EPISODE.get()) is None:
        raise EnvError(f"{what} is used outside of an episode; make it in generate")
    return found


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
        self._known: dict[str, list[int]] = {}
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
        trajectory, tokens = self.model.trajectory, list(sample.tokens)
        placed, end = list[Any](), 0
        for call in self.calls:
            path = [*(call.context or ()), *call.reply.ids]
            if len(path) > end and tokens[: len(path)] == path:
                turn = next(turn for turn in trajectory.turns if turn.reply is call.reply.message)
                placed, end = (
                    [
                        one
                        for one in trajectory.media_placements(turn.prompt)
                        if one.end <= turn.context
                    ],
                    len(path),
                )
        wrong = "a text-only model has none"
        if self.processor is None or (
            wrong := self.processor.check(sample.multimodal_train_inputs, placed, tokens[end:])
        ):
            raise EnvError(
                f"multimodal_train_inputs: {wrong}; the trainer computes its own, so leave it None"
            )

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
        context = self._ids_of(str(text)) if ids is None else [int(one) for one in ids]
        options = sampling_options(payload.get("sampling_params") or {}, payload.get("image_data"))
        started = time.monotonic()
        reply = await self.model.generate(context, **options)
        self.calls.append(EngineCall(context, reply))
        params = payload.get("sampling_params") or {}
        skips = bool(params.get("skip_special_tokens", True))  # as SGLang
        replied = (
            self.model.tokenizer.decode(list(reply.ids), skip_special_tokens=True)
            if skips
            else reply.raw_text
        )
        if isinstance(text, str):
            self._known[text + replied] = [*context, *reply.ids]
        logprobs = [
            [one, token, None] for one, token in zip(reply.logprobs, reply.ids, strict=True)
        ]
        meta = {
            "id": str(len(self.calls)),
            "finish_reason": {"type": FINISH.get(reply.finish, reply.finish)},
            "prompt_tokens": len(context),
            "completion_tokens": len(reply.ids),
            "cached_tokens": 0,
            "e2e_latency": time.monotonic() - started,
            "weight_version": "default",
        }
        if payload.get("return_logprob"):
            meta["output_token_logprobs"] = logprobs
        return {"text": replied, "output_ids": list(reply.ids), "meta_info": meta}

    def _ids_of(self, text: str) -> list[int]:
        """Return the ids of a text, those that were sampled where it begins with a known one."""
        known = max((one for one in self._known if text.startswith(one)), key=len, default="")
        rest = (
            self.model.tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]
            if text != known
            else []
        )
        return [*self._known.get(known, ()), *rest]
