"""Names of release 3.6."""

from swift.rollout.multi_turn import *  # noqa: F403
