"""Teachers on servers: vLLM, SGLang, or `turnwright serve`.

`RemoteTeacher.ask` sends each row of a step's episodes once, before the step's first update;
`score` reads the answers from what came back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from turnwright.config import TeacherConfig
from turnwright.engines.scoring import IdScores, ScoreRequest
from turnwright.errors import ConfigError, TurnwrightError
from turnwright.renderers.chat_renderer import ChatRenderer
from turnwright.rollouts.standalone import run_sync
from turnwright.training.forward.batch import TeacherScores, TrainingBatch
from turnwright.training.forward.divergence import TeacherTargets
from turnwright.training.teachers.teacher import Hint, TaughtPolicy, Teacher
from turnwright.types import Sample, Trajectory
from turnwright.types.media import placements_between

if TYPE_CHECKING:
    from turnwright.engines.remote import RemoteEngine

MOST = 32
"""Maximum concurrent requests per server."""
Slot = tuple[int, int, int]
"""Trajectory (its `id`), span, offset."""


class RemoteTeacher(Teacher):
    """A model on servers, which read exactly the ids that the policy received."""

    def __init__(
        self,
        config: TeacherConfig,
        name: str,
        policy: TaughtPolicy,
        hint: Hint | None,
        renderer: ChatRenderer,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """Connect to the servers; raise `ConfigError` for one that does not compute the policy's
        distribution."""
        super().__init__(config, name, policy, hint)
        self._renderer = renderer
        self._on_note = on_note or (lambda line: None)
        self._kinds: dict[str, str] = {}
        """Kind of the server at each URL."""
        self._logprobs: dict[Slot, float] = {}
        """Answers of the step."""
        self._tops: dict[Slot, dict[int, float]] = {}
        """The most likely ids of each, with their logprobs."""
        self._context = run_sync(self._check())

    @property
    def context(self) -> int | None:
        return self._context

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        super().ask(trajectories)
        self._logprobs = {}
        self._tops = {}
        asked = [trajectory for trajectory in trajectories if self._answered[id(trajectory)]]
        failures = run_sync(self._ask(asked))

        # Of what it can read, what it answered.
        for trajectory in trajectories:
            key = id(trajectory)
            self._answered[key] = {
                span: [
                    has and (key, span, offset) in self._logprobs
                    for offset, has in enumerate(readable)
                ]
                for span, readable in self._answered[key].items()
            }
        if failures:
            self._on_note(
                f"teacher {self.name}: {len(failures)} rows of episodes have no answer, first: "
                f"{failures[0]}"
            )

    def score(self, batch: TrainingBatch) -> TeacherScores:
        device = batch.weights_n.device
        keys = [id(trajectory) for trajectory in batch.trajectories]
        slots = [(keys[row.trajectory], *slot) for row in batch.rows for slot in row.slots]
        logprobs = [self._logprobs.get(slot, torch.nan) for slot in slots]
        logp_n = torch.tensor(logprobs, dtype=torch.float64, device=device)
        targets = None
        if self.config.signal == "loss":
            targets = self._targets(slots, logp_n)
        return TeacherScores(self.config, self.name, logp_n, targets)

    def _targets(self, slots: Sequence[Slot], logp_n: torch.Tensor) -> TeacherTargets:
        """Return what the loss compares with: ids and logprobs (N, k) of the most likely ids, k as
        many as every answer has; none where k is 0."""
        kind = self.config.divergence
        known_n = logp_n.isfinite()
        tops = [self._tops.get(slot) for slot in slots]
        width = min((len(top) for top in tops if top is not None), default=0)
        if not width:
            return TeacherTargets(kind, known_n)

        # What has no answer is not known, whatever stands in its row.
        rows = [list((top or {}).items())[:width] or [(0, 0.0)] * width for top in tops]
        ids = [[token_id for token_id, _ in row] for row in rows]
        logprobs = [[logprob for _, logprob in row] for row in rows]
        return TeacherTargets(
            kind,
            known_n,
            top_mk=torch.tensor(ids, dtype=torch.long, device=logp_n.device),
            top_logp_mk=torch.tensor(logprobs, dtype=torch.float64, device=logp_n.device),
        )

    # Servers

    async def _engine(self, url: str) -> RemoteEngine:
        from turnwright.engines.remote.capabilities import connect, kind_of

        if url not in self._kinds:
            self._kinds[url] = await kind_of(url, key_env=self.config.key_env)
        engine = await connect(
            url,
            kind=self._kinds[url],
            renderer=self._renderer,
            key_env=self.config.key_env,
            request_s=self.config.timeout_s,
        )
        if self.policy.pixels is not None:
            engine.add_pixel_source(self.policy.pixels)
        return engine

    async def _check(self) -> int | None:
        """Return the context of the servers; raise `ConfigError` for one that cannot score."""
        contexts: list[int] = []
        for url in self.config.urls:
            engine = await self._engine(url)
            try:
                fault = engine.scoring_fault(self._request([0]))
                if fault:
                    raise ConfigError(f"teacher {self.name}: {engine.display_name}: {fault}")
                if engine.context is not None:
                    # A server that scores samples one id, too.
                    contexts.append(engine.context - 1)
            finally:
                await engine.close()
        return min(contexts, default=None)

    def _request(
        self, ids: Sequence[int], sample: Sample | None = None, shift: int = 0
    ) -> ScoreRequest:
        law = self.policy.distribution
        blocks = () if sample is None else placements_between(sample.media, 0, len(ids) - shift)
        return ScoreRequest(
            ids,
            tuple(block.shifted(shift) for block in blocks),
            law.temperature,
            frozenset(law.banned_ids),
            self.config.top or 0,
        )

    async def _ask(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Ask for the rows of episodes; return why some have no answer."""
        engines = [await self._engine(url) for url in self.config.urls]
        limits = [asyncio.Semaphore(MOST) for _ in engines]
        failures: list[str] = []

        async def ask(number: int, trajectory: Trajectory, sample: Sample) -> None:
            wanted = self._wanted(trajectory, sample)
            if not wanted:
                return

            prefix = self.preamble(trajectory)
            ids = [*prefix, *sample.ids[: wanted[-1] + 1]]
            try:
                async with limits[number]:
                    scoring = engines[number].scores(self._request(ids, sample, len(prefix)))
                    scores: IdScores = await asyncio.wait_for(scoring, self.config.timeout_s)
            except ConfigError:
                raise
            except (TurnwrightError, TimeoutError) as error:
                failures.append(
                    str(error) or f"no answer in {self.config.timeout_s:g} s (teacher.timeout_s)"
                )
                return

            # The first id has no score.
            for place in wanted:
                index = len(prefix) + place - 1
                slot = (id(trajectory), *sample.slots[place])
                self._logprobs[slot] = scores.logprobs[index]
                if scores.top:
                    self._tops[slot] = dict(scores.top[index])

        try:
            rows: list[tuple[int, Trajectory, Sample]] = []
            for number, trajectory in enumerate(trajectories):
                for sample in trajectory.samples():
                    rows.append((number % len(engines), trajectory, sample))
            await asyncio.gather(*(ask(*row) for row in rows))
        finally:
            for engine in engines:
                await engine.close()
        return failures

    def _wanted(self, trajectory: Trajectory, sample: Sample) -> list[int]:
        """Return the positions of a row whose ids are trained and that the teacher can read."""
        readable = self._answered[id(trajectory)]
        wanted: list[int] = []
        slots = zip(sample.slots, sample.weights, strict=True)
        for place, ((span, offset), weight) in enumerate(slots):
            if weight and place and span in readable and readable[span][offset]:
                wanted.append(place)
        return wanted
