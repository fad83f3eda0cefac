"""An engine whose replies are written down beforehand: for testing environments and loops, and for demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from turnwise.engines.base import Finish, Generation, Request
from turnwise.errors import EngineError, UsageError
from turnwise.types import Message

Reply = str | Sequence[int]
Script = Callable[[Sequence[Message], Random], Reply]


class ScriptedEngine:
    """Plays replies in place of a model, token by token as a model would have.

    A sequence gives each episode its replies in order, the first to its first turn; asking for more is an `EngineError`. A
    function `(messages, rng) -> reply` sees what the model would see, and a generator seeded by the request. A reply is text
    (encoded by the renderer that the engine is bound to, with the end of the turn) or ids, taken as they are. Every logprob
    is 0.0, which is what it is: the script leaves no choice.

    Example::

        turnwise.rollout(env, tasks, engine=ScriptedEngine(["lookup amber", "answer 7"]))
    """

    context: int | None = None
    version = 0

    def __init__(self, replies: Sequence[Reply] | Script, *, renderer: Any = None) -> None:
        if isinstance(replies, str):
            raise UsageError(f'ScriptedEngine takes a list of replies: write ScriptedEngine(["{replies}"])')
        self._replies = replies
        self.renderer = renderer

    def set_renderer(self, renderer: Any) -> None:
        """Encode text with this renderer from now on."""
        self.renderer = renderer

    async def generate(self, request: Request) -> Generation:
        """The next reply of the request's episode, cut at its token limit and behind a stop text.

        Raises:
            EngineError: when the script has no further reply, or no renderer to encode it with.
        """
        ids = self._reply(request)
        if isinstance(ids, str):
            if self.renderer is None:
                raise EngineError("a ScriptedEngine with text needs a renderer: pass renderer= or use it through a rollout")
            ids = self.renderer.encode_reply(ids)
        ids = list(ids[: request.max_tokens])
        if not ids:
            raise EngineError(f"the script's reply {request.call} is empty; a model samples at least one id")
        stopped = request.stop_text.first_completion(ids) if request.stop_text is not None else 0
        if stopped:  # a script may say on what a model would have been stopped from saying
            ids = ids[:stopped]
        finish: Finish = "stop" if stopped or ids[-1] in request.stop_ids else "length"
        return Generation(ids, [0.0] * len(ids), finish, self.version)

    def _reply(self, request: Request) -> Reply:
        if callable(self._replies):
            return self._replies(request.messages, Random(request.seed))
        if request.call >= len(self._replies):
            raise EngineError(
                f"the script has {len(self._replies)} replies and the episode asks for reply {request.call + 1}: "
                "end the episode earlier or write more replies"
            )
        return self._replies[request.call]

    def release(self, session: str) -> None:
        """Nothing is kept for a session."""

    async def close(self) -> None:
        """Nothing runs."""
