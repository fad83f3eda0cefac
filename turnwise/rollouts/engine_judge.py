"""A judge that is an engine: a model of one's own, or a script in tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

from turnwise.engines import Engine, HasContextLimit, HasRenderer, NeedsRenderer, Request, Sampling
from turnwise.errors import EngineError, JudgeError, UsageError
from turnwise.media import media_as_text
from turnwise.renderers import Renderer, byte_renderer
from turnwise.types import Message, as_messages


class EngineJudge:
    """Asks an engine, through the renderer of its model; equal questions have equal answers.

    Example::

        polite = tw.judged(tw.EngineJudge(engine), "How polite is the assistant?")
    """

    def __init__(
        self, engine: Engine, *, renderer: Renderer | None = None, sampling: Sampling | None = None, max_tokens: int = 512
    ) -> None:
        """
        Args:
            engine: what answers. A `ScriptedEngine` with a function sees the question as its messages.
            renderer: of the engine's model; the engine's own when it has one, else the built-in byte-level ChatML.
            sampling: the distribution to sample from; greedy when not given.
            max_tokens: most tokens of an answer.

        Raises:
            UsageError: for `max_tokens` under 1.
        """
        if max_tokens < 1:
            raise UsageError(f"EngineJudge: max_tokens is {max_tokens}; it is at least 1")
        self.engine = engine
        self.renderer = renderer or (engine.renderer if isinstance(engine, HasRenderer) else None) or byte_renderer()
        self._sampling = sampling or Sampling(temperature=0.0)
        self._max_tokens = max_tokens
        self._numbers = count()
        self._limited = engine if isinstance(engine, HasContextLimit) else None
        if isinstance(engine, NeedsRenderer):
            engine.set_renderer(self.renderer)

    async def ask(self, messages: Sequence[Message]) -> str:
        """The answer's text, without its thinking.

        Raises:
            JudgeError: when the engine fails, or its context is too short.
        """
        messages = media_as_text(as_messages(messages), strict=False)  # a judge is asked in words
        ids = self.renderer.open(messages).ids
        room = self._max_tokens if self.engine_context is None else min(self._max_tokens, self.engine_context - len(ids))
        if room < 1:
            raise JudgeError("engine", f"the question has {len(ids)} tokens and the judge's context {self.engine_context}")
        asked = json.dumps([message.to_dict() for message in messages], default=str)
        seed = int.from_bytes(blake2b(asked.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
        session = f"judge-{id(self)}-{next(self._numbers)}"
        request = Request(
            ids,
            room,
            self.renderer.stop_ids,
            seed,
            session,
            sampling=self._sampling,
            agent="judge",
            messages=messages,
            banned_ids=self.renderer.banned_ids,
        )
        try:
            generation = await self.engine.generate(request)
        except EngineError as error:
            raise JudgeError("engine", f"the judge's engine failed: {error}") from error
        finally:
            self.engine.release(session)
        return self.renderer.parse(generation.ids).text

    @property
    def engine_context(self) -> int | None:
        """Most tokens of question and answer."""
        return None if self._limited is None else self._limited.context
