"""slime's and Miles' fully asynchronous steps. They are here to be named; what replaces them is `[schedule] mode = "async"`."""

from __future__ import annotations

from typing import Any


def generate_rollout_fully_async(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """Play a step.

    Raises:
        NotImplementedError: always; our loop plays steps.
    """
    raise NotImplementedError('a step is played by our loop; set [schedule] mode = "async"')


class FullyAsyncRolloutFn:
    """Miles' class for it."""

    def __init__(self, input: RolloutFnConstructorInput) -> None:  # type: ignore[name-defined]  # noqa: F821  # Miles' own
        self.input = input
