"""What tests of our rollouts in other trainers share: a world of two turns, a real tiny model,
the calls of its engine."""

import asyncio
from dataclasses import dataclass, field

import turnwright as tw
from turnwright.config import ModelConfig
from turnwright.engines import Request
from turnwright.engines.local import LocalEngine
from turnwright.media import MediaStore
from turnwright.renderers.vision import PixelCache
from turnwright.training import create_tiny_model, load_model_and_renderer


class Letters(tw.Env):
    """Two turns with an observation between them; the reward of a turn is its share
    of letters from a to m."""

    def reset(self, task, *, seed=None):
        if task.id == "broken":
            raise ConnectionError("no route to the world")
        self.left = 2

    def step(self, action):
        letters = [char for char in action.raw.lower() if char.isalpha()]
        self.left -= 1
        share = sum(char <= "m" for char in letters) / max(len(letters), 1)
        return tw.Step("More.", reward=share / 2, terminated=self.left == 0)

    @staticmethod
    def tasks(split, n, seed):
        return [tw.Task(f"Write letters {i}.", id=str(i)) for i in range(n)]


async def forks(task, model):
    """An agent function whose two conversations share nothing."""
    await model.generate("One.")
    await model.generate("Two.")
    return 1.0


WORDS = ["alpha kilo tango zulu", "sierra delta mike", "Write letters 1234567890. More."] * 20
LIMITS = tw.Limits(turns=2, turn_tokens=12, on_turn_length="continue")


def make_model(folder, seed=0):
    """A model directory with a tokenizer of transformers."""
    return create_tiny_model(ModelConfig(hidden=32, layers=1), WORDS, folder, seed=seed)


@dataclass
class Calls:
    """What a trainer's engine was asked and sampled, by session."""

    found: list = field(default_factory=list)

    def add(self, session, context, ids, logprobs):
        self.found.append((session, list(context), list(ids), list(logprobs)))

    def of(self, ids):
        """The calls whose context and reply are a prefix of a row."""
        return [
            call
            for call in self.found
            if ids[: len(call[1]) + len(call[2])] == [*call[1], *call[2]]
        ]


class Server:
    """A real model that samples for whoever asks by ids: the engine behind the
    clients of the tests."""

    def __init__(self, path, slots=64, bans=True):
        """`bans` keeps a model that was not trained from sampling control tokens,
        as one that was would."""
        model, self.renderer = load_model_and_renderer(path, path, ModelConfig())
        self.engine = LocalEngine(model, renderer=self.renderer, slots=slots)
        self.store = MediaStore()
        if self.renderer.vision is not None:
            self.pixels = PixelCache(self.renderer.vision, self.store)
            self.engine.add_pixel_source(self.pixels)
        self.calls, self.asked = Calls(), []
        self.banned = self.renderer.invalid_ids if bans else frozenset()

    async def sample(
        self, session, ids, max_tokens, stop_ids, temperature=1.0, texts=(), images=()
    ):
        """Sample; returns ids, logprobs and the finish reason.

        `images` belong to the blocks among the ids, in their order.
        """
        placed = ()
        if images:
            expanded, placed = self.renderer.vision.place(
                list(ids), [self.store.put(tw.Image(one)) for one in images]
            )
            assert expanded == list(ids), "the ids have a block for each image"
        stop = tw.StopText(texts, self.renderer.decode) if texts else None
        request = Request(
            list(ids),
            max_tokens,
            frozenset(stop_ids),
            len(self.asked) + 1,
            str(session),
            sampling=tw.Sampling(temperature=temperature),
            banned_ids=frozenset(self.banned),
            stop_text=stop,
            media=placed,
        )
        self.asked.append(request)
        found = await self.engine.generate(request)
        self.calls.add(session, ids, found.ids, found.logprobs)
        return list(found.ids), list(found.logprobs), found.finish


def check_row(calls, prompt, response, mask, logprobs):
    """Hold a row to the engine: ids, logprobs and mask are those of its replies, and
    nothing else is trained."""
    ids = [*prompt, *response]
    found = calls.of(ids)
    assert found, "no call of the engine is in the row"
    trained, expected = [0] * len(ids), [0.0] * len(ids)
    for _, context, sampled, their_logprobs in found:
        start = len(context)
        trained[start : start + len(sampled)] = [1] * len(sampled)
        expected[start : start + len(sampled)] = their_logprobs
    assert mask == trained[len(prompt) :]
    assert sum(trained[: len(prompt)]) == 0
    assert logprobs == expected[len(prompt) :]
    return found


def run(work):
    return asyncio.run(work)
