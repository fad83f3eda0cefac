"""What invariants are tested on: play functions that branch, rewind, edit history and hand over, an
environment that fails, a history policy that forgets."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import turnwright as tw
from kit.rollouts import AsyncTalk


async def best_of_two(task, model):
    """Two replies to each prompt at the same time; the conversation goes on with one of them."""
    rng = random.Random(task.id)
    messages = [{"role": "user", "content": "Begin."}]
    for _ in range(rng.randint(1, 4)):
        both = await asyncio.gather(model.generate(messages), model.generate(messages))
        messages = [
            *messages,
            rng.choice(both).message,
            {"role": "user", "content": rng.choice("ab")},
        ]
    return 1.0


async def planner_and_worker(task, model):
    """A planner asks workers side by side, each for several turns, and goes
    on with what they say."""
    rng = random.Random(task.id)
    plan = [{"role": "system", "content": "Plan."}, {"role": "user", "content": task.id}]

    async def work(number):
        messages = [{"role": "user", "content": f"Part {number}."}]
        for _ in range(rng.randint(1, 3)):
            reply = await model.generate(messages, agent="worker")
            messages = [*messages, reply.message, {"role": "user", "content": "More."}]
        return reply.text

    for _ in range(2):
        reply = await model.generate(plan, agent="planner")
        results = await asyncio.gather(*[work(number) for number in range(2)])
        plan = [*plan, reply.message, *[{"role": "user", "content": text} for text in results]]
    return 0.5


async def edited(task, model):
    """Rewrites its own history now and then: a reply's text, an early message, or
    all of it by a summary."""
    rng = random.Random(task.id)
    messages = [{"role": "user", "content": "Begin."}]
    for _ in range(6):
        reply = await model.generate(messages, max_tokens=rng.choice((None, 3)))
        messages = [*messages, reply.message, {"role": "user", "content": rng.choice("abc")}]
        edit = rng.randrange(5)
        if edit == 0:
            messages[1] = {"role": "assistant", "content": "rewritten"}
        elif edit == 1:
            messages[0] = {"role": "user", "content": "Begin again."}
        elif edit == 2:
            messages = [{"role": "user", "content": "Summary."}]


async def verbatim(task, model):
    """Speaks ids: random ones, grown, cut back, and branched."""
    rng = random.Random(task.id)
    ids = [rng.randrange(200) for _ in range(5)]
    for _ in range(6):
        before = list(ids)
        reply = await model.generate(ids)
        assert ids == before, "the caller's own list grew"
        ids = [*before, *reply.ids, *[rng.randrange(200) for _ in range(3)]]
        if rng.random() < 0.4:
            ids = ids[: rng.randint(1, len(ids))]
        if rng.random() < 0.2:
            ids[rng.randrange(len(ids))] = 7
    return 0.0


class Breaks(AsyncTalk):
    """Fails now and then, and says something else when it is played again, so that the
    attempt is begun anew."""

    made = 0

    async def reset(self, task, *, seed=None):
        Breaks.made += 1
        self.mine = Breaks.made
        return await super().reset(task, seed=seed)

    async def step(self, action):
        if random.Random(self.mine).random() < 0.5 and self.left == 5:
            raise OSError("gone")
        step = await super().step(action)
        return step._replace(observation=f"{self.mine}")


def forgets(conversation, replies):
    """Drops, edits and makes up messages, by what was said alone."""
    rng = random.Random(len(conversation))
    shown = list(conversation[:1])
    for number, message in enumerate(conversation[1:-1], 1):
        kind = rng.randrange(5)
        if kind == 0 and number in replies:
            shown.append(
                replace(message, content="I said something.", tool_calls=(), reasoning=None)
            )
        elif kind == 1:
            shown.append(tw.Message("user", "[left out]"))
        else:
            shown.append(message)
    return [*shown, conversation[-1]]
