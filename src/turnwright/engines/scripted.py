"""ScriptedEngine: predefined replies, for tests of environments and loops and for demonstrations.

The smallest engine: `generate` shows what the contract of `protocols.py` asks of a reply, without
a model. It has no weights to update and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from turnwright.engines.protocols import Finish, Generation, Request
from turnwright.errors import EngineError, UsageError
from turnwright.types import Message

Reply = str | Sequence[int]
Script = Callable[[Sequence[Message], Random], Reply]


class ScriptedEngine:
    """Returns scripted replies in place of a model's.

    A sequence gives each episode its replies in order; a request beyond them is an `EngineError`. A
    function `(messages, rng) -> reply` gets the messages and a generator seeded by the request.

    A reply is text, encoded by the renderer with the end of the turn, or ids, used as they are.
    Every logprob is 0.0: the script leaves no choice, so an id has itself as its only alternative.

    Example::

        turnwright.rollout(env, tasks, engine=ScriptedEngine(["lookup amber", "answer 7"]))
    """

    context: int | None = None
    version = 0
    gives_alternatives = True

    def __init__(self, replies: Sequence[Reply] | Script, *, renderer: Any = None) -> None:
        if isinstance(replies, str):
            raise UsageError(
                f'ScriptedEngine takes a list of replies: write ScriptedEngine(["{replies}"])'
            )
        self._replies = replies
        self.renderer = renderer

    def set_renderer(self, renderer: Any) -> None:
        """Encode text with this renderer."""
        self.renderer = renderer

    async def generate(self, request: Request) -> Generation:
        """Return the next reply of the request's episode.

        It is truncated at the request's token limit and after a stop text.

        Raises:
            EngineError: when the script has no further reply, a reply is empty, or text has no
                renderer.
        """
        reply: Reply
        if callable(self._replies):
            reply = self._replies(request.messages, Random(request.seed))
        elif request.call < len(self._replies):
            reply = self._replies[request.call]
        else:
            raise EngineError(
                f"the script has {len(self._replies)} replies and the episode asks for reply "
                f"{request.call + 1}: end the episode earlier or write more replies"
            )

        if isinstance(reply, str):
            if self.renderer is None:
                raise EngineError(
                    "a ScriptedEngine with text needs a renderer: pass renderer= or use it "
                    "through a rollout"
                )
            ids: Sequence[int] = self.renderer.encode_reply(reply)
        else:
            ids = reply
        ids = list(ids[: request.max_tokens])
        if not ids:
            raise EngineError(
                f"the script's reply {request.call} is empty; a model samples at least one id"
            )

        # A script may continue where a model would have stopped.
        stop_count = 0
        if request.stop_text is not None:
            stop_count = request.stop_text.first_completion(ids)
        if stop_count:
            ids = ids[:stop_count]
        finish: Finish = "stop" if stop_count or ids[-1] in request.stop_ids else "length"
        generation = Generation(ids, [0.0] * len(ids), finish, self.version)
        if request.alternatives:
            generation.alternatives = [[(id_, 0.0)] for id_ in ids]
        return generation

    def release(self, session: str) -> None:
        """Do nothing: sessions have no state."""

    async def close(self) -> None:
        """Do nothing."""
