"""A stack machine must leave one number on its stack: the goal."""

import random

import turnwright as tw

ORDERS = ("add", "up", "down")


class StackMachine(tw.Env):
    """`add` replaces the two numbers on top by their sum; `up` and `down` change
    the one on top by one."""

    single_turn_best = 0.2
    max_turns = 8

    def reset(self, task, *, seed=None):
        self.goal, self.stack = task.info["goal"], list(task.info["stack"])
        return self.show()

    def step(self, action):
        order = action.text.strip()
        if order not in ORDERS or (order == "add" and len(self.stack) < 2):
            raise tw.InvalidAction(f"no such order\n{self.show()}")
        if order == "add":
            self.stack.append(self.stack.pop() + self.stack.pop())
        else:
            self.stack[-1] += 1 if order == "up" else -1
        done = self.stack == [self.goal]
        return tw.Step(self.show(), reward=float(done), terminated=done)

    def show(self):
        return f"goal {self.goal} stack {' '.join(map(str, self.stack))}"

    @staticmethod
    def tasks(split, n, seed):
        rng = random.Random(f"{split} {seed}")
        tasks = {}
        for _ in range(20 * n):
            stack = [rng.randrange(1, 6) for _ in range(rng.choice((2, 3)))]
            goal = sum(stack) + rng.randrange(-3, 4)
            if goal > 0 and ((3 * stack[0] + stack[1] + goal) % 5 == 0) == (split == "eval"):
                task = tw.Task(info={"stack": stack, "goal": goal})
                tasks[task.id] = task
        return list(tasks.values())[:n]

    @staticmethod
    def solver(messages, rng):
        words = messages[-1].text.split()
        goal, stack = (
            int(words[words.index("goal") + 1]),
            [int(word) for word in words[words.index("stack") + 1 :]],
        )
        return "add" if len(stack) > 1 else "up" if stack[0] < goal else "down"

    @staticmethod
    def demonstrator(messages, rng):
        return StackMachine.solver(messages, rng) if rng.random() < 0.7 else rng.choice(ORDERS)
