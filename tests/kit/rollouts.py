"""Engines that remember what they were asked, worlds that talk, tokenizers of several kinds, and
what every record keeps to."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

import turnwright as tw
from turnwright.engines import Generation
from turnwright.renderers import CHATML, MARKUP, SPECIAL, ChatRenderer, ChatTemplate, HFTokenizer
from turnwright.training.advantages import CreditSettings, advantages
from turnwright.types import FAILED_ATTEMPT

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from "
    "or one had by word but not"
)


@dataclass
class Call:
    """One call that an engine answered."""

    session: str
    agent: str
    context: tuple[int, ...]
    max_tokens: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int


@dataclass
class Sampler:
    """Samples ids at random by the request's seed, seldom what a tokenizer would write, and
    remembers every call."""

    vocabulary: int = 256
    most: int = 12
    context: int | None = None
    version: int = 0
    ends: float = 1.0
    """How often a reply ends before its limit."""
    aborts: float = 0.0
    delay: float = 0.0
    """Most seconds of wall-clock time, drawn anew each run."""
    calls: list[Call] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    running: int = 0
    peak: int = 0

    answered: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    """Calls of running sessions by seed and position: after an empty answer,
    the next one draws anew."""

    def rng(self, request: tw.Request) -> random.Random:
        """What the answer to a call is drawn from: it does not depend on the
        order of concurrent calls."""
        tries = self.answered[request.session, request.seed, request.reply_position]
        return random.Random(f"{request.seed}/{request.reply_position}/{tries}")

    def allowed(self, request: tw.Request) -> list[int]:
        return [
            i
            for i in range(self.vocabulary)
            if i not in request.stop_ids and i not in request.banned_ids
        ]

    def draw(self, rng: random.Random, request: tw.Request) -> list[int]:
        """What a reply says, without its end."""
        return rng.choices(
            self.allowed(request), k=min(rng.randint(0, self.most), request.max_tokens)
        )

    async def generate(self, request: tw.Request) -> Generation:
        context = tuple(request.ids)
        assert request.max_tokens >= 1
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            for _ in range(random.randrange(4) if self.delay else 1):
                await asyncio.sleep(self.delay * random.random() if self.delay else 0)
        finally:
            self.running -= 1
        assert tuple(request.ids) == context, "the context changed while the call ran"
        rng = self.rng(request)
        self.answered[request.session, request.seed, request.reply_position] += 1
        ids = self.draw(rng, request)
        finish = "stop"
        if rng.random() < self.aborts:
            finish = "abort"
        elif rng.random() >= self.ends:
            finish = "length"
            ids = rng.choices(self.allowed(request), k=request.max_tokens)
        else:
            ids = [*ids[: request.max_tokens - 1], min(request.stop_ids)]
        if request.stop_text is not None and (count := request.stop_text.first_completion(ids)):
            ids, finish = ids[:count], "stop"
        logprobs = [-rng.random() * 9 for _ in ids]
        call = Call(
            request.session,
            request.agent,
            context,
            request.max_tokens,
            tuple(ids),
            tuple(logprobs),
            self.version,
        )
        self.calls.append(call)
        return Generation(ids, logprobs, finish, self.version)

    def release(self, session: str) -> None:
        self.released.append(session)
        for key in [key for key in self.answered if key[0] == session]:
            del self.answered[key]

    async def close(self) -> None:
        pass


class Talk(tw.Env):
    """Says something random for some turns; a step pays what the seed says."""

    turns = 8
    texts: Sequence[str] = (
        "yes",
        "no \u00e9\u4e2d\U0001f600",
        "line\nline",
        "",
        "  padded ",
        '{"a": 1}',
    )

    def reset(self, task, *, seed=None):
        self.rng = random.Random(f"{task.id}/{seed}")
        self.left = self.turns
        return self.rng.choice(["Begin.", [{"role": "system", "content": "Be brief."}, "Begin."]])

    def say(self) -> Any:
        pick = self.rng.choice
        kind = self.rng.randrange(4)
        if kind == 0:
            return None
        if kind == 1:
            return [
                {"role": "tool", "content": pick(self.texts)},
                {"role": "user", "content": pick(self.texts)},
            ]
        return pick(self.texts)

    def step(self, action):
        self.left -= 1
        return tw.Step(
            self.say(), reward=self.rng.random(), terminated=self.left <= 0, info={"n": self.left}
        )


class AsyncTalk(Talk):
    """The same on the event loop."""

    async def reset(self, task, *, seed=None):
        return Talk.reset(self, task, seed=seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return Talk.step(self, action)

    async def close(self):
        pass


def tasks(count: int) -> list[tw.Task]:
    return [tw.Task(f"Task {number}", id=f"t{number}") for number in range(count)]


def facts(trajectory: tw.Trajectory) -> Any:
    """All of a trajectory but what the clock says, to be compared."""
    turns = [
        (
            t.agent,
            t.prompt,
            t.context,
            t.spans,
            t.messages,
            t.reply,
            t.parent,
            t.finish,
            t.reward,
            dict(t.info),
        )
        for t in trajectory.turns
    ]
    spans = [
        (s.origin, s.ids, s.parent, s.start, s.logprobs, s.version, s.agent, s.untrained, s.media)
        for s in trajectory.spans
    ]
    error = trajectory.error and (
        trajectory.error.type,
        trajectory.error.message,
        trajectory.error.phase,
    )
    return (
        trajectory.key,
        spans,
        turns,
        trajectory.reward,
        trajectory.rewards,
        trajectory.stop,
        error,
        trajectory.final,
        trajectory.metrics,
        trajectory.branches,
        trajectory.template,
    )


def check_record(trajectory: tw.Trajectory, calls: Sequence[Call]) -> None:
    """Hold one trajectory to invariants 1, 2, 3 and 6, against what the engine says
    it was asked and gave."""
    key = trajectory.key
    session = f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt}"
    mine = [call for call in calls if call.session == session]
    _check_forest(trajectory)
    found: Counter[Any] = Counter()
    for span in trajectory.spans:
        if span.sampled:
            context = trajectory.path(span.parent)[: span.start] if span.parent >= 0 else []
            found[span.agent, tuple(context), span.ids, span.logprobs, span.version] += 1
    for number, turn in enumerate(trajectory.turns):
        context = trajectory.prompt_ids(number)
        assert len(context) == turn.context
        assert {trajectory.spans[index].agent for index, _ in trajectory.chain(turn.prompt)} == {
            turn.agent
        }
        for index in turn.spans:
            span = trajectory.spans[index]
            assert (span.agent, span.start) == (turn.agent, len(context))
            assert trajectory.path(index) == [*context, *span.ids]
            context += span.ids
    asked = Counter(
        (call.agent, call.context, call.ids, call.logprobs, call.version)
        for call in mine
        if call.ids
    )
    assert found == asked, (
        "what is recorded as sampled is not what the engine sampled, in the context that it saw"
    )
    _check_rows(trajectory, mine)
    assert trajectory.stop is not None
    if trajectory.error is not None and trajectory.error.phase != "close":
        assert trajectory.reward is None
    ledger = advantages([tw.Group(trajectory.task, [trajectory])], CreditSettings(min_group=1))
    assert ledger.sampled == trajectory.sampled_tokens == sum(ledger.tokens.values())


def _check_forest(trajectory: tw.Trajectory) -> None:
    for index, span in enumerate(trajectory.spans):
        span.check()
        assert span.ids, "a span without ids"
        assert -1 <= span.parent < index
        assert (
            span.start == 0
            if span.parent < 0
            else 0 < span.start <= trajectory.spans[span.parent].end
        )
        assert len(span.mask) == len(span.ids)
        assert set(span.mask) == {int(span.origin == "model")}


def _check_rows(trajectory: tw.Trajectory, calls: Sequence[Call]) -> None:
    trained: Counter[Any] = Counter()
    for row in trajectory.samples():
        assert (
            len(row.ids)
            == len(row.mask)
            == len(row.weights)
            == len(row.logprobs)
            == len(row.versions)
        )
        for at, (mask, weight) in enumerate(zip(row.mask, row.weights, strict=True)):
            assert weight in (0.0, float(mask))
            assert (row.logprobs[at] is None) is (mask == 0)
            assert (row.versions[at] is None) is (mask == 0)
            if weight:
                trained[tuple(row.ids[: at + 1]), row.logprobs[at]] += 1
    sampled = Counter(
        (call.context + call.ids[: at + 1], call.logprobs[at])
        for call in calls
        for at in range(len(call.ids))
    )
    sampled -= _left_out(trajectory)
    assert trained == sampled, (
        "a sampled id is not trained exactly once, in the context that the engine saw"
    )


def _left_out(trajectory: tw.Trajectory) -> Counter[Any]:
    """What calls sampled that ended without a reply, in the form of `_check_rows`: recorded,
    untrained, and part of no turn."""
    replied = {index for turn in trajectory.turns for index in turn.spans}
    left: Counter[Any] = Counter()
    for index, span in enumerate(trajectory.spans):
        assert (span.untrained == FAILED_ATTEMPT) is (span.sampled and index not in replied)
        if span.untrained == FAILED_ATTEMPT:
            path = trajectory.path(index)
            end = len(path) - len(span.ids)
            for at, logprob in enumerate(span.logprobs or ()):
                left[tuple(path[: end + at + 1]), logprob] += 1
    return left


def linear(trajectory: tw.Trajectory) -> bool:
    """Whether every prompt extends all that came before it (nobody rewrote history)."""
    whole: list[int] = []
    for number, turn in enumerate(trajectory.turns):
        received = trajectory.prompt_ids(number)
        if received[: len(whole)] != whole:
            return False
        whole = received + [i for index in turn.spans for i in trajectory.spans[index].ids]
    return True


def _texts() -> list[str]:
    rng = random.Random(0)
    words = WORDS.split()
    return [
        " ".join(rng.choice(words) for _ in range(40)) + '\n{"key": 1}, (x); don\'t'
        for _ in range(200)
    ]


@lru_cache
def bpe() -> Tokenizer:
    """A byte-level BPE with ChatML's control tokens and Qwen's markup (added, not special)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


@lru_cache
def bpe_nfkc() -> Tokenizer:
    """The same behind NFKC, with markup that is looked for in the normalised text."""
    tokenizer = Tokenizer.from_str(bpe().to_str())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<tool_result>", special=False, normalized=True)])
    return tokenizer


@lru_cache
def unigram() -> Tokenizer:
    """SentencePiece's kind: word-start marks, Unigram, NFKC, bytes for what is unknown left out."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", *SPECIAL],
        unk_token="<unk>",
        show_progress=False,
        initial_alphabet=[chr(c) for c in range(32, 127)],
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def renderer(kind: str) -> ChatRenderer:
    """A ChatML renderer by the name of its tokenizer: `bytes`, `bpe`, `bpe_nfkc` or `unigram`."""
    return tw.byte_renderer() if kind == "bytes" else _trained(kind)


@lru_cache
def _trained(kind: str) -> ChatRenderer:
    make: Callable[[], Tokenizer] = {"bpe": bpe, "bpe_nfkc": bpe_nfkc, "unigram": unigram}[kind]
    return ChatRenderer(HFTokenizer(make()), ChatTemplate(CHATML), banned=("<|image_pad|>",))
