"""Part `engine` of `real_model.py`: ids that a CPU second samples.

The work is that of a rollout: episodes of four turns in groups of eight that share their prompt,
replies of 8 to 48 ids whose lengths are drawn once, 20 ids of observation after each reply. Ids are
random, a new draw for each round, so that no cache serves two rounds; nothing ends a reply but its
length. Both sides draw ids at temperature 1 of the whole distribution.

`LocalEngine` gets each call as soon as the episode's last reply is there. `generate` gets all
episodes as a batch, turn by turn, padded on the left, and goes on to the longest reply, as its
users' batches do; what it samples over a reply's length is thrown away and not counted. It is
measured in two ways, a new call over the whole context, and with the cache of the turn before
carried on, in which the ids over a reply's length are masked; and in two types. The best of the
four counts. It returns no logprobs, which the engine computes for each id.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from real_model_common import Kind, Spent, has_bfloat16, load, timed

TURNS = 4
GROUP = 8
PROMPT, OBSERVATION = 72, 20
SHORTEST, LONGEST = 8, 48
CONTEXT = 512
"""Ids that an episode may reach; the engine's slots are sized for it."""
FIRST_ID = 100
"""Ids below it are control tokens."""


@dataclass(frozen=True)
class Episode:
    """One episode of the work."""

    name: str
    group: str
    prompt: list[int]
    lengths: list[int]
    observations: list[list[int]]


def make_work(calls: int, vocabulary: int, round_number: int) -> list[Episode]:
    """Return episodes to play at the same time; the lengths of replies are those of every round."""
    lengths, ids = random.Random(f"lengths/{calls}"), random.Random(f"ids/{calls}/{round_number}")

    def draw(count: int) -> list[int]:
        return [ids.randrange(FIRST_ID, vocabulary) for _ in range(count)]

    episodes = []
    for number in range(calls):
        if number % GROUP == 0:
            prompt = draw(PROMPT)
        episode = Episode(
            name=f"{round_number}/{calls}/{number}",
            group=f"{round_number}/{calls}/{number // GROUP}",
            prompt=prompt,
            lengths=[lengths.randint(SHORTEST, LONGEST) for _ in range(TURNS)],
            observations=[draw(OBSERVATION) for _ in range(TURNS)],
        )
        episodes.append(episode)
    return episodes


def sampled_ids(episodes: Sequence[Episode]) -> int:
    """Return how many ids the replies have."""
    return sum(sum(episode.lengths) for episode in episodes)


# Our side


async def play_with_engine(engine: Any, episodes: Sequence[Episode]) -> None:
    """Play all episodes at once, each at its own pace."""
    from turnwright.engines import Request

    async def play(number: int, episode: Episode) -> None:
        ids = list(episode.prompt)
        for turn, length in enumerate(episode.lengths):
            request = Request(
                ids=ids,
                max_tokens=length,
                stop_ids=frozenset(),
                seed=number * TURNS + turn,
                session=episode.name,
                group=episode.group,
                call=turn,
            )
            reply = await engine.generate(request)
            assert len(reply.ids) == length
            ids = ids + reply.ids + episode.observations[turn]
        engine.release(episode.name)

    await asyncio.gather(*(play(number, episode) for number, episode in enumerate(episodes)))


# transformers' side


def play_with_generate(model: Any, episodes: Sequence[Episode], *, carry_cache: bool) -> None:
    """Play all episodes as one batch, turn by turn."""
    from transformers import DynamicCache

    contexts = [list(episode.prompt) for episode in episodes]
    ids, mask = padded_left(contexts)
    cache = None
    for turn in range(TURNS):
        lengths = [episode.lengths[turn] for episode in episodes]
        observations = [episode.observations[turn] for episode in episodes]
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache or DynamicCache(config=model.config),
                max_new_tokens=max(lengths),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
            )
        replies = output.sequences[:, ids.shape[1] :]

        if carry_cache:
            # The context stays where the cache has it, with holes after short replies.
            cache = output.past_key_values
            in_reply = torch.arange(replies.shape[1])[None] < torch.tensor(lengths)[:, None]
            ids = torch.cat([output.sequences, torch.tensor(observations)], 1)
            mask = torch.cat(
                [mask, in_reply.long(), torch.ones(len(episodes), OBSERVATION, dtype=torch.long)], 1
            )
        else:
            for context, reply, length, observation in zip(
                contexts, replies.tolist(), lengths, observations, strict=True
            ):
                context += reply[:length] + observation
            ids, mask = padded_left(contexts)


def padded_left(contexts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return contexts as a batch, and its attention mask."""
    width = max(map(len, contexts))
    ids = torch.zeros(len(contexts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    return ids, mask


def load_for_generate(directory: Path, dtype: torch.dtype) -> Any:
    """Load the model for `generate`, without an id that ends a reply."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


# Both


class EnginePart:
    """All sides of the comparison, which play the same work in turn."""

    def __init__(self, directory: Path, kinds: Sequence[Kind], calls: Sequence[int]) -> None:
        from turnwright.engines.local import LocalEngine

        self.calls = calls
        self.sides: dict[str, Callable[[Sequence[Episode]], None]] = {}
        for kind in kinds:
            model, _ = load(directory, kind)
            self.vocabulary = model.config.vocab_size
            self._add_engine(f"engine {kind}", LocalEngine(model, context=CONTEXT))
            del model
        types = [torch.float32, torch.bfloat16] if has_bfloat16() else [torch.float32]
        for dtype in types:
            self._add_generate(
                f"generate {str(dtype).removeprefix('torch.')}", load_for_generate(directory, dtype)
            )
        self.spent: dict[tuple[str, int], list[Spent]] = {}

    def _add_engine(self, name: str, engine: Any) -> None:
        self.sides[name] = lambda episodes: asyncio.run(play_with_engine(engine, episodes))

    def _add_generate(self, name: str, model: Any) -> None:
        self.sides[name] = partial(play_with_generate, model, carry_cache=False)
        self.sides[f"{name}, cache carried"] = partial(play_with_generate, model, carry_cache=True)

    def warm_up(self) -> None:
        """Let each side compile and allocate what it needs once."""
        for play in self.sides.values():
            play(make_work(2, self.vocabulary, -1))

    def play_round(self, number: int) -> None:
        """Measure each side once for each number of calls."""
        for calls in self.calls:
            episodes = make_work(calls, self.vocabulary, number)
            for name, play in self.sides.items():
                _, cpu_s = timed(partial(play, episodes))
                spent = Spent(cpu_s, sampled_ids(episodes))
                self.spent.setdefault((name, calls), []).append(spent)
                text = f"{calls:2d} calls, {name:32s} {spent.rate:7.1f} ids a CPU second"
                print(f"round {number + 1}: {text}", flush=True)

    def rate(self, name: str, calls: int) -> float:
        """Return the median of a side's ids in a CPU second."""
        return statistics.median(spent.rate for spent in self.spent[name, calls])

    def best_rate(self, start: str, calls: int) -> float:
        """Return the rate of the best of the sides whose names begin so."""
        return max(self.rate(name, calls) for name in self.sides if name.startswith(start))

    def figures(self) -> dict[str, float | None]:
        """Print the medians, and return the ratios."""
        print(f"| ids a CPU second | {' | '.join(f'{calls} calls' for calls in self.calls)} |")
        print("|---" * (len(self.calls) + 1) + "|")
        for name in self.sides:
            rates = [f"{self.rate(name, calls):.1f}" for calls in self.calls]
            print(f"| {name} | {' | '.join(rates)} |")

        most = max(self.calls)
        figures: dict[str, float | None] = {
            "engine_vs_generate": min(
                self.best_rate("engine", calls) / self.best_rate("generate", calls)
                for calls in self.calls
            )
        }
        if "engine mixed" in self.sides:
            ratio = self.rate("engine mixed", most) / self.rate("engine float32", most)
            figures["engine_bf16_vs_fp32"] = ratio
        return figures
