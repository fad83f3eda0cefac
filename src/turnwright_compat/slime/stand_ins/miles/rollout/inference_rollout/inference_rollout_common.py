"""State of Miles' rollouts, and the class for a step that user classes derive from."""

from __future__ import annotations

from typing import Any

from miles.rollout.base_types import RolloutFnConstructorInput
from slime.rollout.sglang_rollout import GenerateState, generate


class InferenceRolloutFn:
    """Miles' own class for a step. Our loop plays the step; a class that derives from it is refused, with what replaces it."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        self.input = input

    async def __call__(self, input: Any) -> Any:
        """Play a step.

        Raises:
            NotImplementedError: always; our loop plays steps.
        """
        raise NotImplementedError("a step is played by our loop; name the generate function in use")


__all__ = ["GenerateState", "InferenceRolloutFn", "generate"]
