"""Judge on an engine: your own model, or a script in tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count

from turnwright.engines import Engine, HasContextLimit, HasRenderer, Request, Sampling
from turnwright.engines.protocols import give_renderer
from turnwright.errors import EngineError, JudgeError, UsageError
from turnwright.media import media_as_text
from turnwright.renderers import Renderer, byte_renderer
from turnwright.types import Message, as_messages


class EngineJudge:
    """Judge that asks an engine, through the renderer of its model.

    Equal questions get equal answers.

    Example::

        >>> engine = tw.ScriptedEngine(lambda messages, rng: "8")
        >>> polite = tw.judged(tw.EngineJudge(engine), "How polite is the assistant?")
    """

    def __init__(
        self,
        engine: Engine,
        *,
        renderer: Renderer | None = None,
        sampling: Sampling | None = None,
        max_tokens: int = 512,
    ) -> None:
        """
        Args:
            engine: samples the answer. A `ScriptedEngine` with a function receives the question as
                its messages.
            renderer: renderer of the engine's model; by default the engine's own, else the
                built-in byte-level ChatML.
            sampling: sampling parameters; greedy by default.
            max_tokens: maximum number of tokens of an answer.

        Raises:
            UsageError: for `max_tokens` under 1.
        """
        if max_tokens < 1:
            raise UsageError(f"EngineJudge: max_tokens must be at least 1, not {max_tokens}")
        if renderer is None and isinstance(engine, HasRenderer):
            renderer = engine.renderer
        self.engine = engine
        self.renderer = renderer or byte_renderer()
        self._sampling = sampling or Sampling(temperature=0.0)
        self._max_tokens = max_tokens
        self._numbers = count()
        self._limited = engine if isinstance(engine, HasContextLimit) else None
        give_renderer(engine, self.renderer)

    async def ask(self, messages: Sequence[Message]) -> str:
        """Return the text of the answer, without its thinking.

        Raises:
            JudgeError: when the engine fails, or its context is too short.
        """
        messages = media_as_text(as_messages(messages), strict=False)
        ids = self.renderer.open(messages).ids
        max_tokens = self._max_tokens
        if self.engine_context is not None:
            max_tokens = min(max_tokens, self.engine_context - len(ids))
        if max_tokens < 1:
            raise JudgeError(
                "engine",
                f"the question has {len(ids)} tokens and the judge's context {self.engine_context}",
            )

        # The seed is of the question, so equal ones get equal answers.
        question = json.dumps([message.to_dict() for message in messages], default=str)
        digest = blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        session = f"judge-{id(self)}-{next(self._numbers)}"
        request = Request(
            ids,
            max_tokens,
            self.renderer.stop_ids,
            seed=int.from_bytes(digest, "big"),
            session=session,
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
        """Context limit of the engine in tokens, question and answer together."""
        return None if self._limited is None else self._limited.context
