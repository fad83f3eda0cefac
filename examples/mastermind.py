"""Two-digit mastermind: find a code of two of five digits."""

import random

import turnwright as tw

CODES = [f"{one} {other}" for one in range(1, 6) for other in range(1, 6)]


def judge(guess, code):
    """Say of each digit whether it is right."""
    return " ".join(
        f"{one} {'yes' if one == other else 'no'}"
        for one, other in zip(guess.split(), code.split(), strict=True)
    )


class Mastermind(tw.Env):
    """The reward is 1 when the code is said within six guesses; one more is
    given with the opening."""

    single_turn_best = 0.2
    max_turns = 6

    def reset(self, task, *, seed=None):
        self.code = task.info["code"]
        return self.show(task.info["first"])

    def step(self, action):
        guess = action.text.strip()
        if guess not in CODES:
            raise tw.InvalidAction("say two digits from 1 to 5")
        done = guess == self.code
        return tw.Step("right" if done else self.show(guess), reward=float(done), terminated=done)

    def show(self, guess):
        return f"guess {judge(guess, self.code)}"

    @staticmethod
    def tasks(split, n, seed):
        pairs = [(code, first) for code in CODES for first in CODES if code != first]
        kept = [
            pair
            for pair in pairs
            if (sum(map(int, "".join(pair).replace(" ", ""))) % 5 == 0) == (split == "eval")
        ]
        chosen = random.Random(seed).sample(kept, min(n, len(kept)))
        return [tw.Task(info={"code": code, "first": first}) for code, first in chosen]

    @staticmethod
    def solver(messages, rng):
        words = messages[-1].text.split()
        if words[0] != "guess":
            return rng.choice(CODES)
        pairs = ((int(words[1]), words[2]), (int(words[3]), words[4]))
        return " ".join(str(digit if said == "yes" else digit % 5 + 1) for digit, said in pairs)

    @staticmethod
    def demonstrator(messages, rng):
        return Mastermind.solver(messages, rng) if rng.random() < 0.6 else rng.choice(CODES)
