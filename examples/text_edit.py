"""Mend a line of text by edit commands."""

import random

import turnwright as tw

TYPOS = {
    "rde": "red",
    "bleu": "blue",
    "gren": "green",
    "wihte": "white",
    "blak": "black",
    "glod": "gold",
    "pnik": "pink",
}
WORDS = tuple(TYPOS.values())


class TextEdit(tw.Env):
    """Two of five words are misspelled; `fix WRONG RIGHT` replaces a word,
    `save` ends the episode."""

    single_turn_best = 0.0
    max_turns = 5

    def reset(self, task, *, seed=None):
        self.words = list(task.info["words"])
        return self.show()

    def step(self, action):
        words = action.text.split()
        if words == ["save"]:
            return tw.Step(reward=float(set(self.words) <= set(WORDS)), terminated=True)
        if len(words) != 3 or words[0] != "fix" or words[1] not in self.words:
            raise tw.InvalidAction(f"say fix WRONG RIGHT, or save\n{self.show()}")
        if words[2] != TYPOS.get(words[1]):
            return tw.Step("that made it worse", terminated=True)
        self.words[self.words.index(words[1])] = words[2]
        return tw.Step(self.show())

    def show(self):
        return "text " + " ".join(self.words)

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(20 * n):
            words = rng.sample(list(TYPOS), 2) + rng.sample(WORDS, 3)
            rng.shuffle(words)
            if (len("".join(words[:3])) % 5 == 0) == (split == "eval"):
                task = tw.Task(info={"words": words})
                tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        wrong = [word for word in messages[-1].text.split() if word in TYPOS]
        return f"fix {wrong[0]} {TYPOS[wrong[0]]}" if wrong else "save"

    @staticmethod
    def demonstrator(messages, rng):
        wrong = [word for word in messages[-1].text.split() if word in TYPOS]
        bad = (
            "save"
            if rng.random() < 0.4
            else f"fix {rng.choice(wrong or WORDS)} {rng.choice(WORDS)}"
        )
        return TextEdit.solver(messages, rng) if rng.random() < 0.7 else bad
