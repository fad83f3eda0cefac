"""Tokens and turns that an episode may still use."""

from __future__ import annotations

from turnwright.config import Limits
from turnwright.errors import LimitReached
from turnwright.types import StopReason


class Budget:
    """Tokens and turns that an episode has used of its limits, and tokens
    reserved by running calls."""

    def __init__(
        self, limits: Limits, *, max_turns: int | None = None, context: int | None = None
    ) -> None:
        """`max_turns` of the environment and `context` of the engine apply in
        addition to the limits."""
        self._limits = limits
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        self.context = min((c for c in (limits.context, context) if c is not None), default=None)
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
        self.used = self.rejected = 0

    def left(self, turns: int, context: int) -> tuple[int, StopReason | None]:
        """Return the token budget of the next reply, after `turns` replies and `context` ids, and
        the limit that sets it."""
        limits = self._limits
        if turns - self.rejected + self._running_calls >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        budget, cause = limits.turn_tokens, StopReason.TURN_LENGTH
        if limits.episode_tokens is not None:
            left = limits.episode_tokens - self.used - self._reserved
            if left < budget:
                budget, cause = left, StopReason.EPISODE_TOKENS
        if self.context is not None and self.context - context < budget:
            budget, cause = self.context - context, StopReason.CONTEXT
        if budget < 1:
            raise LimitReached(
                cause, f"no token is left for a reply after {context} tokens of context"
            )
        return budget, cause

    def check_observation(self, turns: int, tokens: int) -> None:
        """Raise `LimitReached` if so many observed tokens, after `turns` replies, are more than
        the episode has left."""
        limit = self._limits.episode_tokens
        if limit is None or self.used + self._reserved + tokens <= limit:
            return
        if turns - self.rejected + self._running_calls >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
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
