"""Tokens and turns that an episode may still use.

`Budget.left` sets the length of each reply, `Budget.check_observation` refuses what does not fit.
Limits that a reply itself breaks are in `Recorder._limit_of`.
"""

from __future__ import annotations

from turnwright.config import Limits
from turnwright.errors import LimitReached
from turnwright.types import StopReason


class Budget:
    """Tokens and turns that an episode has used of its limits.

    Calls may run concurrently, so each reserves what it may sample.
    """

    def __init__(
        self, limits: Limits, *, max_turns: int | None = None, context: int | None = None
    ) -> None:
        """`max_turns` of the environment and `context` of the engine apply besides the limits."""
        self._limits = limits
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        contexts = [size for size in (limits.context, context) if size is not None]
        self.context = min(contexts, default=None)
        """Maximum ids of prompt and reply; None is unlimited."""
        self.used = 0
        """Tokens sampled and observed after opening prompts."""
        self.rejected = 0
        """Replies rejected as invalid and sampled again."""
        self._running_calls = 0
        self._reserved = 0  # tokens that running calls may sample

    def limit_turns(self, max_turns: int) -> None:
        """Lower the turn limit to `max_turns` if it is higher."""
        self._turns = min(self._turns, max_turns)

    def reset(self) -> None:
        """Restore the complete budget for another attempt."""
        self.used = 0
        self.rejected = 0

    def left(self, turns: int, context: int) -> tuple[int, StopReason | None]:
        """Return the token budget of the next reply, and the limit that sets it.

        `turns` is the number of replies before it, `context` the number of ids. Raises
        `LimitReached` where no turn or no token is left.
        """
        self._check_turns(turns)

        # The smallest of three limits.
        limits = self._limits
        budget = limits.turn_tokens
        reason = StopReason.TURN_LENGTH
        if limits.episode_tokens is not None:
            left_in_episode = limits.episode_tokens - self.used - self._reserved
            if left_in_episode < budget:
                budget = left_in_episode
                reason = StopReason.EPISODE_TOKENS
        if self.context is not None:
            left_in_context = self.context - context
            if left_in_context < budget:
                budget = left_in_context
                reason = StopReason.CONTEXT

        if budget < 1:
            raise LimitReached(
                reason, f"no token is left for a reply after {context} tokens of context"
            )
        return budget, reason

    def _check_turns(self, turns: int) -> None:
        if turns - self.rejected + self._running_calls >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")

    def check_observation(self, turns: int, tokens: int) -> None:
        """Raise `LimitReached` if observed tokens are more than the episode has left.

        `turns` is the number of replies before them.
        """
        limit = self._limits.episode_tokens
        if limit is None or self.used + self._reserved + tokens <= limit:
            return

        # Without another turn the tokens would not be read anyway.
        self._check_turns(turns)
        raise LimitReached(
            StopReason.EPISODE_TOKENS,
            f"{tokens} observed tokens are over limits.episode_tokens = {limit}",
        )

    def reserve(self, tokens: int) -> None:
        """Reserve the tokens that a starting call may sample."""
        self._running_calls += 1
        self._reserved += tokens

    def release(self, tokens: int) -> None:
        """Release the reservation of a finished call; its sampled tokens count as used."""
        self._running_calls -= 1
        self._reserved -= tokens
