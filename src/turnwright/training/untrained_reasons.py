"""Why a sampled id has weight 0 in the loss.

These are the names of metrics (`tokens_<reason>`) and of `TRAINED`'s counterparts in the account of
a step, `StepCredits.tokens`, which adds up to all sampled ids.
"""

from __future__ import annotations

from turnwright.types import StopReason

# Of a whole trajectory.
FAILED = "failed"
"""The episode failed or was interrupted from outside; a reward it has cannot be trusted."""
NO_REWARD = "no_reward"
"""The reward was not computed."""
SIBLING_FAILED = "sibling_failed"
"""Another episode of the group failed, and `on_failure` drops the group."""
GROUP_TOO_SMALL = "group_too_small"
"""Fewer than `min_group` trajectories of the group are usable."""
NO_SIGNAL = "no_signal"
"""Zero-variance group: all usable trajectories have the same reward."""
FILTERED = "filtered"
"""Zero-variance group that dynamic sampling replaces (`train.refill`), or one that
`train.group_filter` or `train.keep_groups` leaves out; in no denominator."""
OVERLONG = "overlong"
"""The episode was cut by a length limit, and `overlong_filter` trains no such episode."""

# Of single ids.
NO_CONTEXT = "no_context"
"""First id of a path: no earlier position predicts it."""
EARLIER_ROUND = "earlier_round"
"""Not in the last round, the only one trained with `loss_scale = "last_round"`."""
WEIGHED = "weighed"
"""An agent function gave its reply's ids weight 0."""
LOSS_SCALE = "loss_scale"
"""A custom loss scale returned weight 0."""
NO_TEACHER = "no_teacher"
"""No reward trains the id, and no teacher answered for it."""
MISMATCH = "mismatch"
"""Excluded by a correction: engine and trainer disagree too much about the id or its trajectory."""

# No reasons, but names of the same metrics.
TRAINED = "trained"
"""Not a reason: ids that carry loss."""
REJECTED = "groups_filtered."
"""Start of the metrics that count groups by the reason of `train.group_filter`."""

CUT_BY_LENGTH = frozenset((StopReason.TURN_LENGTH, StopReason.EPISODE_TOKENS, StopReason.CONTEXT))
"""Ends of an episode that a length limit cut."""
