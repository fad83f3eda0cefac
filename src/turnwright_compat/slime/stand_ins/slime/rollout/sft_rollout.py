"""slime's step of given replies. It is here to be named; what replaces it is `[warmup] dataset`."""

from __future__ import annotations

from typing import Any


def generate_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """Read a step of replies.

    Raises:
        NotImplementedError: always; our loop plays steps.
    """
    raise NotImplementedError("a step is played by our loop; train on given replies with [warmup] dataset")
