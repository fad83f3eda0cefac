"""What the rollout loop costs per turn, over the floor: work W1.

N episodes of T turns run at once through the public `turnwright.rollout` with its defaults on
(reply decoded and parsed, deadlines, limits, journal and records on disk), against an engine
that answers at once with fixed ids. The floor is what no loop can do without: scaffold ids, one
encode of the observation's text, and appending both, measured in the same run. CPU time of the
process, medians of the repeats. The ids of every episode are compared with a re-tokenisation of
its whole conversation, and in a second pool, whose replies do not survive decoding and
encoding, with what was sampled.

The floor encodes by `Tokenizer.encode`, as the peers do. Turnwright looks words up that it has met
before (`turnwright.renderers.bpe_cache`), so it can come out below what is called the floor;
`ratio_library` is the same loop with that switched off, and `ratio_fast_floor` is against a floor
with the library's faster call.

    python benchmarks/rollout_loop.py            # about two minutes
    python benchmarks/rollout_loop.py --quick    # smaller, for a look
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import turnwright as tw
from turnwright.engines import Generation
from turnwright.renderers import CHATML, ChatRenderer, ChatTemplate, HFTokenizer

WORDS = 4000
REPLY = OBSERVATION = 64


def make_tokenizer(rng: random.Random) -> tuple[Tokenizer, list[str]]:
    """A byte-level BPE of 6,000 ids, trained from seeded text, with ChatML's control tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choice(letters) for _ in range(rng.randint(2, 9))) for _ in range(WORDS)]
    texts = [" ".join(rng.choice(words) for _ in range(200)) for _ in range(300)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer, words


def text_of(tokenizer: Tokenizer, words: list[str], rng: random.Random, length: int) -> str:
    """A text of about `length` ids that encodes back to itself."""
    text = ""
    while len(tokenizer.encode(text, add_special_tokens=False).ids) < length:
        text = f"{text} {rng.choice(words)}" if text else rng.choice(words)
    return text


class Fixed:
    """An engine that answers at once with the next reply of a pool."""

    context = None
    version = 0

    def __init__(self, pool: list[list[int]]) -> None:
        self.pool = pool
        self.logprobs = [[-0.5 - 0.001 * i for i in range(len(ids))] for ids in pool]

    async def generate(self, request: tw.Request) -> Generation:
        number = (request.seed + request.call) % len(self.pool)
        return Generation(list(self.pool[number]), list(self.logprobs[number]), "stop", 0)

    def release(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


def make_env(observations: list[str], turns: int, *, is_async: bool) -> type[tw.Env]:
    """An environment that says the next observation, `turns - 1` times."""

    class Base(tw.Env):
        def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
            self.number = int(task.answer) * 7919
            self.turn = 0
            return observations[self.number % len(observations)]

        def next(self) -> tw.Step:
            self.turn += 1
            done = self.turn >= turns
            return tw.Step(
                None if done else observations[(self.number + self.turn) % len(observations)],
                0.0,
                done,
            )

    if is_async:

        class Async(Base):
            async def reset(self, task: tw.Task, *, seed: int | None = None) -> str:
                return Base.reset(self, task, seed=seed)

            async def step(self, action: tw.Action) -> tw.Step:
                return self.next()

            async def close(self) -> None:
                pass

        return Async

    class Sync(Base):
        def step(self, action: tw.Action) -> tw.Step:
            return self.next()

    return Sync


def floor(
    encode, tokenizer: Tokenizer, pool: list[list[int]], observations: list[str], n: int, turns: int
) -> list[list[int]]:
    """The yardstick: opening, then reply ids, scaffold ids and one encode of the
    observation, appended."""
    vocab = tokenizer.get_vocab()
    newline = tokenizer.encode("\n", add_special_tokens=False).ids
    user = tokenizer.encode("user\n", add_special_tokens=False).ids
    assistant = tokenizer.encode("assistant\n", add_special_tokens=False).ids
    start, end = vocab["<|im_start|>"], vocab["<|im_end|>"]
    before = [*newline, start, *user]
    after = [end, *newline, start, *assistant]
    rows = []
    for episode in range(n):
        number = episode * 7919
        ids = [start, *user, *encode(observations[number % len(observations)]), *after]
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        for turn in range(turns):
            reply = pool[(number + turn) % len(pool)]
            ids.extend(reply)
            mask.extend([1] * len(reply))
            logprobs.extend([-0.5] * len(reply))
            if turn + 1 < turns:
                text = observations[(number + turn + 1) % len(observations)]
                delta = [*before, *encode(text), *after]
                ids.extend(delta)
                mask.extend([0] * len(delta))
                logprobs.extend([0.0] * len(delta))
        rows.append(ids)
    return rows


def cpu(work) -> tuple[float, object]:
    """CPU seconds of a call, and what it gave."""
    gc.collect()
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


class Clocked(Fixed):
    """Notes the CPU time at which each call of each episode arrives."""

    def __init__(self, pool: list[list[int]]) -> None:
        super().__init__(pool)
        self.stamps: dict[str, list[float]] = {}

    async def generate(self, request: tw.Request) -> Generation:
        self.stamps.setdefault(request.session, []).append(time.process_time())
        return await super().generate(request)

    def growth(self) -> float:
        """Time of the last four gaps between calls over that of the first four,
        summed over all episodes."""
        return sum(s[-1] - s[-5] for s in self.stamps.values()) / sum(
            s[4] - s[0] for s in self.stamps.values()
        )


def check(
    trajectories: list[tw.Trajectory],
    renderer: ChatRenderer,
    template: ChatTemplate,
    *,
    canonical: bool,
) -> bool:
    """Whether each episode's ids are those of its whole conversation rendered at once, or at least
    hold what was sampled."""
    for trajectory in trajectories:
        ids = trajectory.path(len(trajectory.spans) - 1)
        if canonical:
            text = template.render(trajectory.messages)
            # The close's newline after the last reply was never needed.
            encoded = renderer.codec.encode(text)[: len(ids)]
            if ids != encoded:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer episodes and repeats")
    args = parser.parse_args()
    n, repeats = (64, 3) if args.quick else (256, 5)
    rng = random.Random(0)
    tokenizer, words = make_tokenizer(rng)
    template = ChatTemplate(CHATML)
    renderer = ChatRenderer(HFTokenizer(tokenizer), template)
    observations = [text_of(tokenizer, words, rng, OBSERVATION) for _ in range(512)]
    end = tokenizer.token_to_id("<|im_end|>")
    replies = [text_of(tokenizer, words, rng, REPLY - 1) for _ in range(512)]
    pool = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in replies]
    letters = [tokenizer.token_to_id(c) for c in "abcdefghijklmnopqrstuvwxyz"]
    odd = [[*[rng.choice(letters) for _ in range(REPLY - 1)], end] for _ in range(512)]

    def play(
        turns: int,
        *,
        is_async: bool = True,
        engine: Fixed | None = None,
        out: bool = True,
        share: float | None = None,
    ) -> list[tw.Trajectory]:
        env = make_env(observations, turns, is_async=is_async)
        tasks = [tw.Task(answer=i) for i in range(n)]
        limits = tw.Limits(turns=turns)
        with tempfile.TemporaryDirectory() as folder:
            return tw.rollout(
                env,
                tasks,
                engine or Fixed(pool),
                renderer=renderer,
                limits=limits,
                out=Path(folder) / "run" if out else None,
                **({} if share is None else {"sanity_share": share}),
            )

    codec = renderer.codec
    words = codec._words

    def library(turns: int) -> list[tw.Trajectory]:
        codec._words = None
        try:
            return play(turns)
        finally:
            codec._words = words

    def slow(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def fast(text: str) -> list[int]:
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    works = {
        "floor": lambda t: floor(slow, tokenizer, pool, observations, n, t),
        "fast floor": lambda t: floor(fast, tokenizer, pool, observations, n, t),
        "ours": play,
        "without files": lambda t: play(t, out=False),
        "sync env": lambda t: play(t, is_async=False),
        "library": library,
        "no sanity": lambda t: play(t, share=0.0),
        "all compared": lambda t: play(t, share=1.0),
    }
    # Nothing is known yet: words, shapes of messages, the template's compiled form. The
    # floor has no such state.
    cold, opened = cpu(lambda: play(8))
    cold_floor = statistics.median(cpu(lambda: works["floor"](8))[0] for _ in range(repeats))
    checks = sum(t.metrics.get("template_checks", 0) for t in opened)
    breaks = sum(
        n for t in opened for name, n in t.metrics.items() if name.startswith("template_breaks")
    )
    print(
        f"cold, T=8: {cold / cold_floor:.2f} of the floor; {checks} of {n} episodes compared, "
        f"{breaks} differ"
    )
    print("CPU us a turn" + "".join(f"{name:>15}" for name in works))
    for turns in (1, 8, 32, 64):
        for work in works.values():  # the heap grows to its size once
            work(turns)
        rows = [
            [cpu(lambda w=w, t=turns: w(t))[0] / n / turns * 1e6 for w in works.values()]
            for _ in range(repeats)
        ]
        last = dict(
            zip(
                works,
                (statistics.median(column) for column in zip(*rows, strict=True)),
                strict=True,
            )
        )
        ratios = {
            name: statistics.median(row[i] / row[0] for row in rows) for i, name in enumerate(works)
        }
        ratios["ours/fast"] = statistics.median(row[2] / row[1] for row in rows)
        print(f"T={turns:<11}" + "".join(f"{value:15.1f}" for value in last.values()))
        print("of the floor " + "".join(f"{ratios[name]:15.2f}" for name in works))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept_alive = play(64)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    del kept_alive
    clock = Clocked(pool)
    same = check(play(64, engine=clock), renderer, template, canonical=True)
    grown = clock.growth()
    kept = all(
        list(span.ids) in odd
        for t in play(8, engine=Fixed(odd))
        for span in t.spans
        if span.sampled
    )
    print(
        f"ids equal to full re-tokenisation: {same}; odd replies kept verbatim: {kept}; python "
        f"{sys.version.split()[0]}"
    )
    row = {
        "us_per_turn": round(last["ours"], 1),
        "floor_us_per_turn": round(last["floor"], 1),
        "ratio": round(ratios["ours"], 3),
        "ratio_cold": round(cold / cold_floor, 3),
        "ratio_no_sanity": round(ratios["no sanity"], 3),
        "ratio_all_compared": round(ratios["all compared"], 3),
        "ratio_sync": round(ratios["sync env"], 3),
        "ratio_fast_floor": round(ratios["ours/fast"], 3),
        "ratio_library": round(ratios["library"], 3),
        "us_journal": round(last["ours"] - last["without files"], 1),
        "growth": round(grown, 3),
        "peak_growth_mb": round(grown_mb),
        "ids_equal": same and kept,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
