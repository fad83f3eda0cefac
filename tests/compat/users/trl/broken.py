"""Environments that cannot be used."""


class NoReset:
    def play(self, word: str) -> str:
        """
        Play.

        Args:
            word: A word.
        """
        return word

    def get_reward(self) -> float:
        return 0.0


class NeedsArguments:
    def __init__(self, url):
        self.url = url

    def reset(self, **row):
        return None

    def get_reward(self):
        return 0.0


class NoReward:
    def reset(self, **row):
        return None

    def play(self, word: str) -> str:
        """
        Play.

        Args:
            word: A word.
        """
        return word


class NoDocstring(NoReward):
    def shout(self, word: str) -> str:
        return word.upper()

    def get_reward(self) -> float:
        return 0.0


class RewardNeeds(NoReward):
    def get_reward(self, completion):
        return 0.0
