"""Teachers on servers: vLLM, SGLang, or `turnwright serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
        """Connect to the servers; raise `ConfigError` for one that does not compute the
        policy's distribution."""
        super().__init__(config, name, policy, hint)
        self._renderer, self._on_note = renderer, on_note or (lambda line: None)
        self._kinds: dict[str, str] = {}
        self._found: dict[Slot, float] = {}
        self._tops: dict[Slot, dict[int, float]] = {}
        self._context = run_sync(self._check())

    @property
    def context(self) -> int | None:
        return self._context

    def ask(self, trajectories: Sequence[Trajectory]) -> None:
        super().ask(trajectories)
        self._found, self._tops = {}, {}
        failures = run_sync(self._ask([t for t in trajectories if self._answered[id(t)]]))
        for trajectory in trajectories:
            number = id(trajectory)
            self._answered[number] = {
                span: [
                    has and (number, span, offset) in self._found
                    for offset, has in enumerate(given)
                ]
                for span, given in self._answered[number].items()
            }
        if failures:
            self._on_note(
                f"teacher {self.name}: {len(failures)} rows of episodes have no answer, first: "
                f"{failures[0]}"
            )

    def score(self, batch: TrainingBatch) -> TeacherScores:
        device = batch.weights_n.device
        numbers = [id(trajectory) for trajectory in batch.trajectories]
        slots = [(numbers[row.trajectory], *slot) for row in batch.rows for slot in row.slots]
        logp_n = torch.tensor(
            [self._found.get(slot, torch.nan) for slot in slots], dtype=torch.float64, device=device
        )
        targets = None
        if self.config.signal == "loss":
            targets = TeacherTargets(
                self.config.divergence, logp_n.isfinite(), **self._top_tensors(slots, device)
            )
        return TeacherScores(self.config, self.name, logp_n, targets)

    def _top_tensors(self, slots: Sequence[Slot], device: torch.device) -> dict[str, torch.Tensor]:
        """Return ids and logprobs (N, k) of the most likely ids, k as many as every answer has."""
        tops = [self._tops.get(slot) for slot in slots]
        width = min((len(top) for top in tops if top is not None), default=0)
        if not width:
            return {}
        rows = [list((top or {}).items())[:width] or [(0, 0.0)] * width for top in tops]
        ids = torch.tensor(
            [[one for one, _ in row] for row in rows], dtype=torch.long, device=device
        )
        logps = torch.tensor(
            [[logp for _, logp in row] for row in rows], dtype=torch.float64, device=device
        )
        return {"top_mk": ids, "top_logp_mk": logps}

    # Servers

    async def _engine(self, url: str) -> RemoteEngine:
        from turnwright.engines.remote.capabilities import connect, kind_of

        if url not in self._kinds:
            self._kinds[url] = await kind_of(url, key_env=self.config.key_env)
        config = self.config
        options: dict[str, Any] = {
            "renderer": self._renderer,
            "key_env": config.key_env,
            "request_s": config.timeout_s,
        }
        engine = await connect(url, kind=self._kinds[url], **options)
        if self.policy.pixels is not None:
            engine.add_pixel_source(self.policy.pixels)
        return engine

    async def _check(self) -> int | None:
        contexts = []
        for url in self.config.urls:
            engine = await self._engine(url)
            try:
                if fault := engine.scoring_fault(self._request([0])):
                    raise ConfigError(f"teacher {self.name}: {engine.display_name}: {fault}")
                # A server that scores samples one id, too.
                contexts += [] if engine.context is None else [engine.context - 1]
            finally:
                await engine.close()
        return min(contexts, default=None)

    def _request(
        self, ids: Sequence[int], sample: Sample | None = None, shift: int = 0
    ) -> ScoreRequest:
        law = self.policy.distribution
        blocks = () if sample is None else placements_between(sample.media, 0, len(ids) - shift)
        media = tuple(block.shifted(shift) for block in blocks)
        return ScoreRequest(
            ids, media, law.temperature, frozenset(law.banned_ids), self.config.top or 0
        )

    async def _ask(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Ask for the rows of episodes; return why some have no answer."""
        engines = [await self._engine(url) for url in self.config.urls]
        limits = [asyncio.Semaphore(MOST) for _ in engines]
        failures: list[str] = []

        async def ask(number: int, trajectory: Trajectory, sample: Sample) -> None:
            has = self._answered[id(trajectory)]
            wanted = [
                place
                for place, ((span, offset), weight) in enumerate(
                    zip(sample.slots, sample.weights, strict=True)
                )
                if weight and place and span in has and has[span][offset]
            ]
            if not wanted:
                return
            prefix = self.preamble(trajectory)
            ids = [*prefix, *sample.ids[: wanted[-1] + 1]]
            try:
                async with limits[number]:
                    scoring = engines[number].scores(self._request(ids, sample, len(prefix)))
                    found: IdScores = await asyncio.wait_for(scoring, self.config.timeout_s)
            except ConfigError:
                raise
            except (TurnwrightError, TimeoutError) as error:
                failures.append(
                    str(error) or f"no answer in {self.config.timeout_s:g} s (teacher.timeout_s)"
                )
                return
            for place in wanted:
                at, slot = len(prefix) + place - 1, (id(trajectory), *sample.slots[place])
                self._found[slot] = found.logprobs[at]
                if found.top:
                    self._tops[slot] = dict(found.top[at])

        try:
            rows = [
                (number, t, sample)
                for number, t in enumerate(trajectories)
                for sample in t.samples()
            ]
            await asyncio.gather(
                *(ask(number % len(engines), t, sample) for number, t, sample in rows)
            )
        finally:
            for engine in engines:
                await engine.close()
        return failures
