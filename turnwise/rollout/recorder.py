"""Writes down one episode as it happens: what was sent, what was sampled, what the world answered."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from turnwise.config import Limits
from turnwise.engine import Engine, Generation, Request, Sampling
from turnwise.errors import BackendContractError, EngineError, LimitReached
from turnwise.render import Branch, Extend, Renderer
from turnwise.rollout.seeds import call_seed, episode_seed
from turnwise.trace.record import failure_row, key_row, span_row, turn_row
from turnwise.trace.run import JsonLines
from turnwise.types import Message, Origin, Span, StopReason, Trajectory, Turn

_MOST_ABORTS = 100
"""Aborted calls in a row without one new id, after which the engine counts as broken."""

Wait = Callable[[Awaitable[Generation], float], Awaitable[Generation]]


Tools = Sequence[Mapping[str, Any]]


class Path:
    """A conversation that goes on: the end of a path through the forest, and its ids as one growing list."""

    __slots__ = ("agent", "fresh", "ids", "leaf", "messages", "tools", "turn")

    def __init__(self, leaf: int, ids: list[int], messages: list[Message], tools: Tools, agent: str) -> None:
        self.leaf = leaf
        self.ids = ids
        self.messages = messages
        """The conversation so far."""
        self.fresh: tuple[Message, ...] = tuple(messages)
        """What was said since the last reply."""
        self.turn = -1
        """The turn that ended in the last reply, -1 before the first."""
        self.tools = tools
        self.agent = agent


class Recorder:
    """The record of one running episode, under its limits.

    Used by the loop over an environment and by play functions alike. Every sampled id is in the journal before anything
    else happens to it.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        engine: Engine,
        renderer: Renderer,
        limits: Limits,
        *,
        sampling: Sampling,
        seed: int,
        journal: JsonLines | None = None,
        max_turns: int | None = None,
        min_version: int = 0,
    ) -> None:
        """
        Args:
            trajectory: an empty one, which is filled.
            engine: what samples.
            renderer: of the engine's model.
            limits: of the episode.
            sampling: the distribution to sample from.
            seed: the run's.
            journal: where each turn is written before the next begins.
            max_turns: a limit of the environment's own, beside `limits.turns`.
            min_version: the oldest policy that may answer.
        """
        self.trajectory = trajectory
        self.engine = engine
        self.renderer = renderer
        self.limits = limits
        self.phase = "reset"
        """What the episode is doing, for failures and for whoever wonders what it waits for."""
        self.since = time.monotonic()
        trajectory.template = renderer.fingerprint
        key = trajectory.key
        self.seed = episode_seed(seed, key)
        self.session = f"{key.phase}/{key.step}/{key.task}/{key.sample}/{key.attempt}"
        self._group = f"{key.phase}/{key.step}/{key.task}"
        self._sampling = sampling
        self._journal = journal
        self._key = key_row(key)
        self._turns = limits.turns if max_turns is None else min(limits.turns, max_turns)
        contexts = [c for c in (limits.context, getattr(engine, "context", None)) if c is not None]
        self._context = min(contexts) if contexts else None
        self.unrewarded = False
        """Whether the world could not say the reward of some turn."""
        self._min_version = min_version
        self._calls = 0
        self._used = 0  # tokens sampled and observed behind opening prompts
        self._written = 0  # spans that the journal holds
        self._answers: list[tuple[int, float | None, Mapping[str, Any], float]] = []
        if journal is not None:
            journal.append({"e": "opened", "k": self._key, "template": renderer.fingerprint})

    # Growing the forest

    def open(self, messages: Sequence[Message], tools: Tools = (), agent: str = "main") -> Path:
        """A new conversation.

        Raises:
            TemplateError: when the template cannot show it.
        """
        rendered = self.renderer.open(messages, tools)
        self._count_neutralised(rendered.neutralised)
        leaf = self._add(Span(Origin.PROMPT, tuple(rendered.ids), agent=agent))
        return Path(leaf, list(rendered.ids), list(messages), tools, agent)

    def observe(self, path: Path, messages: tuple[Message, ...]) -> None:
        """What the world says behind the last reply of a path.

        Raises:
            TemplateError: when the template cannot append it.
        """
        reply_ids = self.trajectory.spans[path.leaf].ids
        rendered = self.renderer.extend(path.messages, reply_ids, messages, path.tools)
        most = self.limits.observation_tokens
        if most is not None and len(rendered.ids) > most:
            messages = self._cut(messages, most)
            rendered = self.renderer.extend(path.messages, reply_ids, messages, path.tools)
        self._count_neutralised(rendered.neutralised)
        self.append(path, rendered)
        path.messages.extend(messages)
        path.fresh = messages

    def append(self, path: Path, rendered: Extend | Branch) -> None:
        """Ids that were not sampled, behind a path or behind an earlier point of it."""
        ids, close = rendered.ids, 0
        if isinstance(rendered, Branch):
            self._branch(path, rendered)
        else:
            close = rendered.close
        if close:
            path.leaf = self._add(Span(Origin.TEMPLATE, tuple(ids[:close]), path.leaf, len(path.ids), agent=path.agent))
            path.ids.extend(ids[:close])
            ids = ids[close:]
        if ids:
            path.leaf = self._add(Span(Origin.ENV, tuple(ids), path.leaf, len(path.ids), agent=path.agent))
            path.ids.extend(ids)
        self._used += len(rendered.ids)

    def answer(self, turn: int, reward: float | None, info: Mapping[str, Any], env_s: float) -> None:
        """The world's verdict on a turn; in the journal before the next one."""
        record = self.trajectory.turns[turn]
        record.reward, record.env_s = reward, env_s
        if info:
            record.info = dict(info)
        self._answers.append((turn, reward, record.info, env_s))
        if reward is None:
            self.unrewarded = True

    def _branch(self, path: Path, branch: Branch) -> None:
        reasons = self.trajectory.branches
        reasons[branch.reason] = reasons.get(branch.reason, 0) + 1
        links = self.trajectory.chain(path.leaf)
        while links and self.trajectory.spans[links[-1][0]].start >= branch.keep:
            links.pop()
        path.leaf = links[-1][0] if links else -1
        del path.ids[branch.keep :]

    def _add(self, span: Span) -> int:
        self.trajectory.spans.append(span)
        return len(self.trajectory.spans) - 1

    def _count_neutralised(self, count: int) -> None:
        if count:
            metrics = self.trajectory.metrics
            metrics["neutralised"] = metrics.get("neutralised", 0) + count

    def _cut(self, messages: tuple[Message, ...], most: int) -> tuple[Message, ...]:
        """The messages with the longest texts cut, so that together they keep to `most` ids, and a mark where they were."""
        share = max(1, (most - 16 * len(messages)) // len(messages))
        kept: list[Message] = []
        for message in messages:
            ids = self.renderer.encode(message.text)
            if len(ids) <= share:
                kept.append(message)
                continue
            text = f"{self.renderer.decode(ids[:share])}\n[cut: {share} of {len(ids)} tokens shown]"
            kept.append(Message(message.role, text, tool_call_id=message.tool_call_id, name=message.name))
            metrics = self.trajectory.metrics
            metrics["observation_tokens_cut"] = metrics.get("observation_tokens_cut", 0) + len(ids) - share
        return tuple(kept)

    # Sampling

    async def generate(
        self, path: Path, wait: Wait, *, max_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Turn:
        """Sample the next reply of a path and write it down.

        Args:
            path: where the reply goes; it grows by it.
            wait: waits for the engine under a deadline, `wait(awaitable, seconds)`.
            max_tokens: fewer tokens than `limits.turn_tokens` allows.
            sampling: another distribution than the episode's.

        Raises:
            LimitReached: when a limit leaves no room for a reply, or the reply itself broke one (it is recorded then).
            EngineError: when the engine fails or breaks its contract.
            TimeoutError: when it does not answer in time.
        """
        budget, cause = self._budget(len(path.ids))
        if max_tokens is not None and max_tokens < budget:
            budget, cause = max_tokens, None
        context, prompt = len(path.ids), path.leaf
        began = time.monotonic()
        self.phase, self.since = "generate", began
        spans: list[int] = []
        ids: list[int] = []
        aborts = 0
        while True:
            request = self._request(path, budget - len(ids), sampling or self._sampling)
            generation = await wait(self.engine.generate(request), self.limits.generate_s)
            self._verify(generation, request)
            if generation.ids:
                spans.append(self._add_reply(path, generation))
                ids.extend(generation.ids)
            if generation.finish != "abort":
                break
            if len(ids) >= budget:
                generation.finish = "length"
                break
            aborts = 0 if generation.ids else aborts + 1
            if aborts > _MOST_ABORTS:
                raise EngineError(f"the engine aborted {aborts} calls in a row without sampling anything")
        reply = self.renderer.parse(ids, path.tools)
        turn = Turn(path.agent, prompt, context, tuple(spans), path.fresh, reply, path.turn, generation.finish)
        turn.generate_s = time.monotonic() - began
        if generation.extras:
            turn.extras = dict(generation.extras)
        self.trajectory.turns.append(turn)
        path.turn = len(self.trajectory.turns) - 1
        path.messages.append(reply)
        path.fresh = ()
        self._write(turn)
        self._judge(ids, generation, cause)
        return turn

    def _budget(self, context: int) -> tuple[int, StopReason | None]:
        """How many tokens the next reply may have, and which limit makes it so few (None: the caller's)."""
        limits = self.limits
        if len(self.trajectory.turns) >= self._turns:
            raise LimitReached(StopReason.MAX_TURNS, f"the episode had all its {self._turns} turns")
        budget, cause = limits.turn_tokens, StopReason.TURN_LENGTH
        if limits.episode_tokens is not None and limits.episode_tokens - self._used < budget:
            budget, cause = limits.episode_tokens - self._used, StopReason.EPISODE_TOKENS
        if self._context is not None and self._context - context < budget:
            budget, cause = self._context - context, StopReason.CONTEXT
        if budget < 1:
            raise LimitReached(cause, f"no token is left for a reply behind {context} tokens of context")
        return budget, cause

    def _request(self, path: Path, max_tokens: int, sampling: Sampling) -> Request:
        call = self._calls
        self._calls = call + 1
        return Request(
            path.ids,
            max_tokens,
            self.renderer.stop_ids,
            call_seed(self.seed, call),
            self.session,
            self._group,
            call,
            sampling,
            path.agent,
            (),
            path.messages,
            self.renderer.banned_ids,
            min_version=self._min_version,
        )

    def _verify(self, generation: Generation, request: Request) -> None:
        """Hold an answer to the engine's contract; nothing is repaired.

        Raises:
            BackendContractError: naming what is wrong.
        """
        ids, logprobs = generation.ids, generation.logprobs
        name = type(self.engine).__name__
        if len(ids) != len(logprobs):
            raise BackendContractError(f"{name} gave {len(logprobs)} logprobs for {len(ids)} ids")
        if not ids and generation.finish != "abort":
            raise BackendContractError(f"{name} gave no ids and says {generation.finish!r}")
        if len(ids) > request.max_tokens:
            raise BackendContractError(f"{name} gave {len(ids)} ids where {request.max_tokens} were asked for")
        try:
            finite = isfinite(sum(logprobs))
        except TypeError:
            finite = False
        if not finite:
            raise BackendContractError(f"{name} gave a logprob that is missing or not finite")
        if generation.finish == "stop" and ids[-1] not in request.stop_ids:
            raise BackendContractError(f"{name} says 'stop' behind id {ids[-1]}, which is no stop id")
        if generation.finish not in ("stop", "length", "abort"):
            raise BackendContractError(f"{name} gave the finish reason {generation.finish!r}")
        if generation.version < request.min_version:
            raise BackendContractError(f"{name} sampled with policy {generation.version}, older than {request.min_version}")

    def _add_reply(self, path: Path, generation: Generation) -> int:
        start = len(path.ids)
        ids, logprobs = tuple(generation.ids), tuple(generation.logprobs)
        path.leaf = self._add(Span(Origin.MODEL, ids, path.leaf, start, logprobs, generation.version, (), path.agent))
        path.ids.extend(ids)
        self._used += len(ids)
        return path.leaf

    def _judge(self, ids: Sequence[int], generation: Generation, cause: StopReason | None) -> None:
        """End the episode where the reply itself breaks a limit."""
        if not self.renderer.invalid_ids.isdisjoint(ids):
            raise LimitReached(StopReason.INVALID_TOKEN, "the reply holds a control token out of place")
        if generation.finish == "length" and cause is not None:
            if cause is StopReason.TURN_LENGTH and self.limits.on_turn_length == "continue":
                return
            raise LimitReached(cause, f"the reply reached {len(ids)} tokens without an end")

    # The journal

    def _write(self, turn: Turn) -> None:
        if self._journal is None:
            return
        event = {"e": "turn", "k": self._key, "n": len(self.trajectory.turns) - 1, "spans": self._new_spans()}
        if self._answers:
            event["answers"] = self._answers
        event["turn"] = turn_row(turn)
        self._journal.append(event)
        self._answers = []

    def _new_spans(self) -> list[dict[str, Any]]:
        spans = self.trajectory.spans
        rows = [span_row(span) for span in spans[self._written :]]
        self._written = len(spans)
        return rows

    def close(self) -> None:
        """The episode is over: everything about it is in the journal now."""
        if self._journal is None:
            return
        trajectory = self.trajectory
        self._journal.append(
            {
                "e": "closed",
                "k": self._key,
                "spans": self._new_spans(),
                "answers": self._answers,
                "stop": trajectory.stop,
                "reward": trajectory.reward,
                "rewards": trajectory.rewards,
                "error": failure_row(trajectory.error),
                "final": [message.to_dict() for message in trajectory.final],
                "metrics": trajectory.metrics,
                "branches": trajectory.branches,
                "wall_s": trajectory.wall_s,
            }
        )
