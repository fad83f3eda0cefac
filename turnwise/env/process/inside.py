"""Whether this process is one that environments and rewards have of their own."""

import os

ISOLATED_ENV_VAR = "TURNWISE_NURSERY"
"""Set in the environment of such processes."""


def in_isolated_process() -> bool:
    """Whether it is."""
    return bool(os.environ.get(ISOLATED_ENV_VAR))
