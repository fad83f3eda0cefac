"""Sampled tokens a second of `LocalEngine` with drafts from what stood before, and
without, on replies that repeat.

The work: a model says what it was shown again and again, now and then with another id. Prompts are
128 random ids, replies are 384 ids that go round in the prompt from a random place on, in which one
id in `--changed` (by chance) is another one. The ids are forced on both sides, since a model of
random weights repeats nothing; each side computes the distributions, draws, and has the draw
replaced. The logprobs of both have to be equal to the bit. `--novel` takes random replies instead:
what the look-up costs where nothing repeats.

Both sides run in turn in this process on one thread; a rate is the median of the repeats,
tokens by process CPU time, which other work on the machine disturbs less than the clock,
prompts included. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from turnwright.engines import Generation, Request
from turnwright.engines.local import LocalEngine
from turnwright.engines.local.sampler import Sampler
from turnwright.engines.local.step_rows import RowDraw

VOCABULARY, PROMPT, REPLY = 2048, 128, 384
SIZES = {"small": (128, 4, 4), "medium": (512, 6, 8)}
"""Hidden size, layers and heads."""


def build(size: str) -> Any:
    """A Qwen3 with random weights."""
    hidden, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,  # noqa: E501
        num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=hidden // heads, tie_word_embeddings=False,  # noqa: E501
        max_position_embeddings=2048, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def work(batch: int, changed: float) -> list[tuple[list[int], list[int]]]:
    """Prompts and replies."""
    chance = random.Random(batch)
    made = []
    for _ in range(batch):
        prompt = [chance.randrange(VOCABULARY) for _ in range(PROMPT)]
        first = chance.randrange(PROMPT)
        said = [prompt[at % PROMPT] for at in range(first, first + REPLY)]
        reply = [chance.randrange(VOCABULARY) if chance.random() < changed else id_ for id_ in said]
        made.append((prompt, reply))
    return made


class Forced(Sampler):
    """Draws as the engine does, then puts the id of the work in place of the drawn one."""

    def __init__(self) -> None:
        self.replies: list[list[int]] = []

    def pick(self, cdf: torch.Tensor, draws: Sequence[RowDraw]) -> torch.Tensor:
        """The ids of the work."""
        drawn = super().pick(cdf, draws)
        wanted = [self.replies[int(draw.request.session)][draw.position] for draw in draws]
        drawn[: len(wanted)] = torch.tensor(wanted, device=drawn.device)
        return drawn


async def play(engine: LocalEngine, pairs: list[tuple[list[int], list[int]]]) -> list[Generation]:
    """All replies at once."""
    calls = [
        Request(prompt, REPLY, frozenset(), number, str(number))
        for number, (prompt, _) in enumerate(pairs)
    ]
    heard = await asyncio.gather(*(engine.generate(call) for call in calls))
    for number, (answer, (_, reply)) in enumerate(zip(heard, pairs, strict=True)):
        assert answer.ids == reply
        engine.release(str(number))
    return heard


def measure(model: Any, batch: int, options: argparse.Namespace) -> dict[str, float]:
    """The rates with and without, of one number of replies at a time."""
    pairs = work(batch, 1.0 if options.novel else 1 / options.changed)
    forced = Forced()
    forced.replies = [reply for _, reply in pairs]
    sides = {
        most: LocalEngine(model, sampler=forced, speculate=most) for most in (0, options.speculate)
    }
    rates: dict[int, list[float]] = {most: [] for most in sides}
    clocks: dict[int, list[float]] = {most: [] for most in sides}
    heard: dict[int, list[Generation]] = {}

    async def main() -> None:
        for repeat in range(options.repeats + 1):
            for most, engine in sides.items():
                cpu, wall = time.process_time(), time.perf_counter()
                heard[most] = await play(engine, pairs)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                if repeat:  # the first run makes room
                    rates[most].append(batch * REPLY / cpu)
                    clocks[most].append(batch * REPLY / wall)
        for engine in sides.values():
            await engine.close()

    asyncio.run(main())
    plain, drafting = heard[0], heard[options.speculate]
    if next(iter(sides.values())).exact and [g.logprobs for g in plain] != [
        g.logprobs for g in drafting
    ]:
        raise SystemExit("logprobs with and without drafts differ: no comparison")
    drafted, accepted = sum(g.drafted for g in drafting), sum(g.accepted for g in drafting)
    chosen = clocks if options.clock else rates
    without, with_ = statistics.median(chosen[0]), statistics.median(chosen[options.speculate])
    print(
        f"batch {batch:3d}: {without:8.0f} tokens/s without, {with_:8.0f} with, "
        f"{with_ / without:.2f} times; {drafted} drafted, {accepted} accepted",
        flush=True,
    )
    return {
        "without": without,
        "with": with_,
        "ratio": with_ / without,
        "accepted": accepted / drafted if drafted else 0.0,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--speculate", type=int, default=7, help="most ids drafted at a time")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each side, of which the median counts"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads; 0 leaves torch's default"
    )
    parser.add_argument(
        "--changed", type=int, default=96, help="one id in so many is not what stood before"
    )
    parser.add_argument("--novel", action="store_true", help="replies that repeat nothing")
    parser.add_argument("--clock", action="store_true", help="rates by the clock")
    parser.add_argument("--device", default=None, help="where to compute")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = build(options.size)
    if options.device:
        model = model.to(options.device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, drafts of up to "
        f"{options.speculate} ids"
    )
    result = {str(batch): measure(model, batch, options) for batch in (1, 16)}
    print(json.dumps({"size": options.size, "speculate": options.speculate, "batch": result}))


if __name__ == "__main__":
    main()
