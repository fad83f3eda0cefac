"""Find a value with cd, ls and cat."""

import random

import turnwright as tw

NAMES = ("red", "blue", "green", "white", "black", "gold", "pink", "gray")


class FileSystem(tw.Env):
    """Two directories with a file each; the question names the directory,
    its file has the value."""

    single_turn_best = 0.1
    max_turns = 6

    def reset(self, task, *, seed=None):
        self.tree, self.folder, self.place = task.info["tree"], task.info["folder"], ""
        return f"value in {self.folder}"

    def step(self, action):
        order, _, name = action.text.strip().partition(" ")
        if order == "answer":
            return tw.Step(reward=float(name == self.tree[self.folder][1]), terminated=True)
        if order == "cd" and name in self.tree:
            self.place = name
            return tw.Step(f"in {name}")
        if order == "ls":
            return tw.Step(
                "files " + " ".join([self.tree[self.place][0]] if self.place else self.tree)
            )
        if order == "cat" and self.place and name == self.tree[self.place][0]:
            return tw.Step(f"value {self.tree[self.place][1]}")
        raise tw.InvalidAction("no such file or order")

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(20 * n):
            names, values = rng.sample(NAMES, 4), rng.sample(range(10), 2)
            if (sum(map(NAMES.index, names[:2])) % 5 == 0) == (split == "eval"):
                tree = {names[0]: [names[2], str(values[0])], names[1]: [names[3], str(values[1])]}
                task = tw.Task(info={"tree": tree, "folder": names[0]})
                tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        word, *rest = messages[-1].text.split()
        if word == "value" and rest[0] != "in":
            return f"answer {rest[0]}"
        return {"value": f"cd {rest[-1]}", "in": "ls", "files": f"cat {rest[0]}"}.get(word, "ls")

    @staticmethod
    def demonstrator(messages, rng):
        guess = rng.choice((f"answer {rng.randrange(10)}", "ls", f"cat {rng.choice(NAMES)}"))
        return FileSystem.solver(messages, rng) if rng.random() < 0.75 else guess
