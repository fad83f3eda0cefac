"""A game of guesses, as TRL's examples of environments are written."""

from trl import GRPOConfig  # a script that also trains; unused here


class Guess:
    """Guess a number."""

    rounds = 0  # instances made

    def __init__(self):
        Guess.rounds += 1
        self.history = []

    def reset(self, secret: int, hint: str = "", **row) -> str:
        self.secret, self.done, self.reward, self.tries = secret, False, 0.0, 0
        self.history.append((row["prompt"][-1]["content"], row.get("level")))
        return f" Between 0 and 9.{hint}"

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: Your guess.

        Returns:
            Whether it is right.
        """
        if self.done:
            raise ValueError("Game over.")
        self.tries += 1
        self.done = number == self.secret
        self.reward = 1.0 / self.tries if self.done else 0.0
        return "right" if self.done else ("too low" if number < self.secret else "too high")

    def ask(self, question: str, times: int = 1) -> dict:
        """
        Ask about the number.

        Args:
            question: What to ask.
            times: How often.
        """
        return {"answer": self.secret % 2 == 0, "times": times}

    def get_reward(self) -> float:
        return self.reward

    def _internal(self):
        return None


CONFIG = GRPOConfig
