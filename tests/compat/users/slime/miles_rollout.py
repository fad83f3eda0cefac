"""A class for a complete step, which our loop replaces."""

from miles.rollout.base_types import RolloutFnConstructorInput


class RolloutOfMiles:
    """Miles' kind of a function for a complete step."""

    def __init__(self, input: RolloutFnConstructorInput):
        self.data_source = input.data_source

    async def __call__(self, input):
        raise NotImplementedError
