"""What turnwright takes of slime and Miles."""

from turnwright.envs.foreign import Framework
from turnwright_compat.slime.adapter import IDS, adapt, find
from turnwright_compat.slime.group_filter import adapt_filter

FRAMEWORK = Framework("slime", adapt, find, lambda: IDS, group_filter=adapt_filter)
