"""Sampled tokens a second of `LocalEngine`, against transformers' `generate` on the same work.

The work: 128 trajectories of 8 turns in groups of 8, prompts of 64 ids, replies of logN(ln 32, 0.6)
ids capped at 160, observations of 32 ids; a Qwen3 of 1.3 M parameters (d 128, 4 layers, 4 heads, 2
key heads, vocabulary 2048), fp32, random weights. The same ids are forced on both sides, each of
which computes the logprobs of what it "sampled"; they have to be equal.

`generate` gets every turn in batches of trajectories sorted by the length of their contexts, left
padded, at the best of batch sizes 32, 64 and 128, and takes the most likely id, which is cheaper
than sampling; the engine draws, and the draw is replaced. Both sides run in this process on one
thread. A rate is tokens by process CPU time, which other work on the machine disturbs less than the
clock; the engine's is the median of its repeats. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3Config,
)

from turnwright.engines import Generation, Request
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.step_rows import RowDraw

VOCABULARY = 2048
GROUPS, SIBLINGS, TURNS = 16, 8, 8
PROMPT, OBSERVATION, CAP = 64, 32, 160
BATCHES = (32, 64, 128)


@dataclass(frozen=True)
class Episode:
    """One trajectory of the work: what is said by whom, all of it fixed."""

    name: str
    group: str
    prompt: list[int]
    replies: list[list[int]]
    observations: list[list[int]]

    def context(self, turn: int) -> list[int]:
        """The ids that the model sees before its reply of a turn."""
        ids = list(self.prompt)
        for reply, observation in zip(self.replies[:turn], self.observations[:turn], strict=True):
            ids += reply + observation
        return ids


def work(seed: int = 0) -> list[Episode]:
    """The trajectories."""
    chance = random.Random(seed)

    def words(count: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(count)]

    episodes = []
    for group in range(GROUPS):
        prompt = words(PROMPT)
        for sibling in range(SIBLINGS):
            lengths = [
                max(1, min(CAP, round(chance.lognormvariate(math.log(32), 0.6))))
                for _ in range(TURNS)
            ]
            replies = [words(length) for length in lengths]
            name = f"{group}.{sibling}"
            episodes.append(
                Episode(name, str(group), prompt, replies, [words(OBSERVATION) for _ in lengths])
            )
    return episodes


def same_lengths(episodes: list[Episode]) -> list[Episode]:
    """The work with every reply cut or filled to the mean length."""
    chance = random.Random(1)
    mean = round(tokens(episodes) / (len(episodes) * TURNS))
    fill = [chance.randrange(VOCABULARY) for _ in range(mean)]
    return [replace(e, replies=[(reply + fill)[:mean] for reply in e.replies]) for e in episodes]


def tokens(episodes: list[Episode]) -> int:
    """How many ids are sampled."""
    return sum(len(reply) for episode in episodes for reply in episode.replies)


def build() -> Any:
    """The model, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,  # noqa: E501
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, max_position_embeddings=2048, pad_token_id=0,  # noqa: E501
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


Logprobs = dict[tuple[str, int], list[float]]


class Forced(Sampler):
    """Draws as the engine does, then puts the id of the work in place of the drawn one."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.replies = {
            (e.name, turn): reply for e in episodes for turn, reply in enumerate(e.replies)
        }

    def pick(self, cdf: torch.Tensor, draws: Sequence[RowDraw]) -> torch.Tensor:
        """The ids of the work."""
        drawn = super().pick(cdf, draws)
        wanted = [
            self.replies[draw.request.session, draw.request.call][draw.position] for draw in draws
        ]
        drawn[: len(wanted)] = torch.tensor(wanted)
        return drawn


def timed(run: Callable[[], Logprobs]) -> tuple[Logprobs, float, float]:
    """The result of a run, its CPU seconds and its seconds by the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = run()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def with_engine(engine: LocalEngine, episodes: list[Episode]) -> Logprobs:
    """All trajectories at once, each going on as soon as its reply is there."""
    logprobs: Logprobs = {}

    async def play(number: int, episode: Episode) -> None:
        ids = list(episode.prompt)
        for turn, reply in enumerate(episode.replies):
            request = Request(
                ids,
                len(reply),
                frozenset(),
                number * TURNS + turn,
                episode.name,
                episode.group,
                turn,
            )
            answer: Generation = await engine.generate(request)
            assert answer.ids == reply
            logprobs[episode.name, turn] = answer.logprobs
            ids = ids + answer.ids + episode.observations[turn]
        engine.release(episode.name)

    async def play_all() -> None:
        await asyncio.gather(*(play(number, episode) for number, episode in enumerate(episodes)))

    asyncio.run(play_all())
    return logprobs


class Forcing(LogitsProcessor):
    """Keeps the logprob of the work's id of each row and makes it the only one
    that `generate` can take."""

    def __init__(self, replies: list[list[int]], start: int) -> None:
        longest = max(map(len, replies))
        self.ids = torch.tensor([reply + [0] * (longest - len(reply)) for reply in replies])
        self.start = start
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores in which the forced ids are the greatest."""
        ids = self.ids[:, input_ids.shape[1] - self.start, None]
        self.logprobs.append(scores.gather(1, ids)[:, 0] - scores.logsumexp(1))
        return scores.scatter(1, ids, torch.inf)


def with_generate(
    model: Any, episodes: list[Episode], batch: int, turns: Sequence[int] = range(TURNS)
) -> Logprobs:
    """Turn by turn, in batches sorted by context length; every batch waits
    for its longest reply."""
    logprobs: Logprobs = {}
    for turn in turns:
        contexts = sorted(
            ((episode.context(turn), episode) for episode in episodes),
            key=lambda pair: len(pair[0]),
        )
        for first in range(0, len(contexts), batch):
            part = contexts[first : first + batch]
            longest = len(part[-1][0])
            ids = torch.tensor([[0] * (longest - len(context)) + context for context, _ in part])
            mask = torch.tensor(
                [[0] * (longest - len(context)) + [1] * len(context) for context, _ in part]
            )
            replies = [episode.replies[turn] for _, episode in part]
            forcing = Forcing(replies, longest)
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=max(map(len, replies)),
                    do_sample=False,
                    logits_processor=LogitsProcessorList([forcing]),
                )
            rows = torch.stack(forcing.logprobs, 1).tolist()
            for (_, episode), row, reply in zip(part, rows, replies, strict=True):
                logprobs[episode.name, turn] = row[: len(reply)]
    return logprobs


def with_continuous_batching(model: Any, episodes: list[Episode], turns: Sequence[int]) -> float:
    """Tokens a second of CPU of transformers' own continuous batching, on some turns, each
    reply of its own length.

    It keeps no cache between turns and is asked for greedy ids, which are not forced: the
    lengths are what matters here.
    """
    settings = ContinuousBatchingConfig(num_blocks=2048, max_batch_tokens=1024)
    config = GenerationConfig(max_new_tokens=CAP, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings, block=True, timeout=5
    ) as manager:

        def play(turn: int, some: list[Episode]) -> int:
            for episode in some:
                manager.add_request(
                    episode.context(turn), max_new_tokens=len(episode.replies[turn])
                )
            return sum(len(manager.get_result(timeout=120).generated_tokens) for _ in some)

        play(0, episodes[:8])  # its first requests pay for the set-up
        cpu, wall = time.process_time(), time.perf_counter()
        count = sum(play(turn, episodes) for turn in turns)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return report(f"continuous batching, turns {', '.join(map(str, turns))}", count, cpu, wall)


def greatest_difference(one: Logprobs, other: Logprobs) -> float:
    """The greatest absolute difference of two sets of logprobs."""
    assert one.keys() == other.keys()
    return max(abs(a - b) for key in one for a, b in zip(one[key], other[key], strict=True))


def report(name: str, count: int, cpu: float, wall: float) -> float:
    """Print a measurement; tokens a second of CPU."""
    print(
        f"{name:44s} {count / cpu:8.0f} tokens/s of CPU {count / wall:8.0f} by the clock "
        f"({cpu:.1f} s, {wall:.1f} s)",
        flush=True,
    )
    return count / cpu


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="torch threads on both sides; 0 leaves torch's default",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of the engine, of which the median counts"
    )
    parser.add_argument(
        "--engine-only", action="store_true", help="leave out what the engine is compared with"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, episodes = build(), work()
    count = tokens(episodes)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {count:,} sampled ids, "
        f"{torch.get_num_threads()} threads"
    )
    engine = LocalEngine(model, sampler=Forced(episodes))
    rates, logprobs = [], {}
    for number in range(options.repeats):
        logprobs, cpu, wall = timed(lambda: with_engine(engine, episodes))
        rates.append(report(f"LocalEngine, run {number + 1}", count, cpu, wall))
    asyncio.run(engine.close())
    result: dict[str, Any] = {"tokens_per_s": statistics.median(rates)}
    if not options.engine_only:
        compare(model, episodes, logprobs, result)
    print(json.dumps(result))


def compare(
    model: Any, episodes: list[Episode], logprobs: Logprobs, result: dict[str, Any]
) -> None:
    """Measure what the engine is held against, and add the ratios to the result."""
    best, size = 0.0, 0
    for batch in BATCHES:
        theirs, cpu, wall = timed(lambda batch=batch: with_generate(model, episodes, batch))  # type: ignore[misc]
        rate = report(f"generate, batches of {batch}", tokens(episodes), cpu, wall)
        print(
            f"    greatest difference of a logprob: {greatest_difference(logprobs, theirs):.1e}",
            flush=True,
        )
        if greatest_difference(logprobs, theirs) > 1e-4:
            raise SystemExit("the logprobs differ by more than 1e-4: no comparison")
        if rate > best:
            best, size = rate, batch
    even = same_lengths(episodes)
    _, cpu, wall = timed(lambda: with_generate(model, even, size))
    rate_even = report(f"generate, batches of {size}, all replies equal", tokens(even), cpu, wall)
    result["vs_generate"] = result["tokens_per_s"] / best
    result["vs_generate_same_lengths"] = result["tokens_per_s"] / rate_even
    result["vs_continuous_batching"] = None
    try:
        rate = with_continuous_batching(copy.deepcopy(model), episodes, (2, 5))
    except Exception as error:
        print(f"transformers' continuous batching did not run here: {error!r}")
    else:
        result["vs_continuous_batching"] = result["tokens_per_s"] / rate


if __name__ == "__main__":
    main()
