"""How many tokens the next reply of an episode may have."""

from __future__ import annotations

from turnwise.config import Limits
from turnwise.errors import LimitReached
from turnwise.types import StopReason


class Budget:
    """What an episode has used up of its limits, and what is promised to calls that run."""

    def __init__(self, limits: Limits, *, max_turns: int | None = None, context: int | None = None) -> None:
        """
        Args:
            limits: of the episode.
            max_turns: a limit of the environment's own, beside `limits.turns`.
            context: what the engine can take, beside `limits.context`.
        """
        self._limits = limits
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        self._context = min((c for c in (limits.context, context) if c is not None), default=None)
        self.used = 0
        """Tokens sampled and observed behind opening prompts."""
        self.rejected = 0
        """Replies that were asked for again."""
        self._under_way = 0  # calls that run, and
        self._promised = 0  # the tokens that they may sample

    def limit_turns(self, most: int) -> None:
        """Grant at most so many turns, or fewer where another limit says so."""
        self._turns = min(self._turns, most)

    def reset(self) -> None:
        """Another attempt has all of it again."""
        self.used = self.rejected = 0

    def left(self, turns: int, context: int) -> tuple[int, StopReason | None]:
        """How many tokens the next reply may have, and which limit makes it so few.

        Args:
            turns: replies sampled so far.
            context: ids in front of the reply.

        Raises:
            LimitReached: when there is no room for a reply.
        """
        limits = self._limits
        if turns - self.rejected + self._under_way >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        budget, cause = limits.turn_tokens, StopReason.TURN_LENGTH
        if limits.episode_tokens is not None:
            left = limits.episode_tokens - self.used - self._promised
            if left < budget:
                budget, cause = left, StopReason.EPISODE_TOKENS
        if self._context is not None and self._context - context < budget:
            budget, cause = self._context - context, StopReason.CONTEXT
        if budget < 1:
            raise LimitReached(cause, f"no token is left for a reply behind {context} tokens of context")
        return budget, cause

    def reserve(self, tokens: int) -> None:
        """A call begins that may sample so many."""
        self._under_way += 1
        self._promised += tokens

    def release(self, tokens: int) -> None:
        """The call is over; what it sampled counts as used."""
        self._under_way -= 1
        self._promised -= tokens
