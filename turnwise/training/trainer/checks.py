"""Mismatch bounds, template identity, weight-sync probe.

Whether the last update has reached the engine, by what it says and not by what it says of itself.

A fingerprint is the engine's own word, and a bound on |dlogp| lets a small update pass that was lost. So at a few places of the
last step's trajectories the trainer notes its distribution before and after the update, and the engine is asked there for its
likeliest id. At each place the share of the update that is missing is ``(engine - after) / (before - after)`` of that id's
logprob: 0 for an engine that has the update, 1 for one that has the weights of before, anything where rounding is larger than
the update. Of 16 places at which rounding alone decides, 13 have a share from 0.5 to 1.5 once in 38 million steps: a ratio of
two independent centred normals is in there with a probability of at most 1/6, whatever their sizes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnwise.config import TrainConfig
from turnwise.engines import Engine, Generation, Request, Sampling
from turnwise.errors import ConfigError, SyncError, TraceError, TurnwiseError, UsageError
from turnwise.records import RunDir
from turnwise.renderers.chat_renderer import ChatRenderer
from turnwise.training.advantages import Credit
from turnwise.training.forward.batch import MicroBatch, TrainingBatch, TrainingRow, padded, rows_of
from turnwise.training.forward.head import SamplingDistribution
from turnwise.training.loss import BANNED_LOGIT, logprob_mismatch
from turnwise.types import Trajectory


def mismatch_bound(config: TrainConfig, dtype: torch.dtype) -> float:
    """The largest |logprob of trainer - of engine| that is let pass, in nats.

    By default 1e-3 in float32 (a right engine is within 1e-4) and none below, where rounding alone reaches 0.2; nor with a
    correction, which is asked for where the two differ.
    """
    if config.max_mismatch is not None:
        return config.max_mismatch
    return math.inf if dtype in (torch.bfloat16, torch.float16) or config.correction != "none" else 1e-3


def divergence_bound(config: TrainConfig) -> float:
    """The largest KL(engine || trainer) per token, on average over a batch, that is let pass, in nats.

    By default 0.1, which rounding is far from in any precision and a run that falls apart comes to; none where `max_mismatch`
    was given, which says that they differ on purpose.
    """
    if config.max_mismatch_kl is not None:
        return config.max_mismatch_kl
    return 0.1 if config.max_mismatch is None else math.inf


def check_mismatch(
    batch: TrainingBatch,
    bound: float,
    *,
    law: SamplingDistribution,
    banned: int,
    dtype: torch.dtype,
    divergence: float = math.inf,
) -> None:
    """Compare the trainer's logprobs before the first update with the engine's.

    Raises:
        TurnwiseError: when the trainer gives a sampled id no probability.
        SyncError: when one differs by more than `bound`, or all of them on average by a KL over `divergence`.
    """
    assert batch.start_n is not None
    odd_n = ~(batch.start_n > 0.5 * BANNED_LOGIT)
    if bool(odd_n.any()):
        raise TurnwiseError(
            f"the trainer gives no probability to an id that was sampled in {_where(batch, int(odd_n.nonzero()[0]))}: it is a "
            "banned id, or the model's weights are no longer finite; see that the engine is given the same banned_ids"
        )
    gap_n = (batch.start_n - batch.engine_n).abs().nan_to_num(0.0)
    worst = int(gap_n.argmax())
    figures = logprob_mismatch(batch.start_n, batch.engine_n)
    check = (
        f"weights (version and fingerprint), samples at temperature {law.temperature:g} with top_p {law.top_p:g} and "
        f"top_k {law.top_k}, bans the same "
        f"{banned} ids, and computes in {str(dtype).removeprefix('torch.')}; if it differs on purpose,"
    )
    if gap_n[worst] <= bound and figures.get("mismatch_k3", 0.0) > divergence:
        raise SyncError(
            f"engine and trainer sample from different policies: KL(engine || trainer) is {figures['mismatch_k3']:.3g} nats a "
            f"token, over train.max_mismatch_kl = {divergence:g}, effective sample size {100 * figures['ess']:.0f}%. "
            f"The weights were left as they are. Check that the engine has the newest {check} raise train.max_mismatch_kl or "
            "set train.correction"
        )
    if gap_n[worst] <= bound:
        return
    raise SyncError(
        f"engine and trainer disagree about what was sampled: |logprob of trainer - of engine| is {gap_n[worst]:.3g} at worst, "
        f"{figures['mismatch_mean']:.3g} on average, and over train.max_mismatch = {bound:g} for {int((gap_n > bound).sum())} "
        f"of {batch.size} ids (worst in {_where(batch, worst)}: {batch.engine_n[worst]:.4f} in the engine, "
        f"{batch.start_n[worst]:.4f} in the trainer). The weights were left as they are. Check that the engine has the newest "
        f"{check} raise train.max_mismatch or set train.correction"
    )


def check_logprobs(batch: TrainingBatch, key: str = "train.old_logprobs = 'engine'", other: str = "trainer") -> None:
    """See that the engine gave every logprob, for ratios that are taken against them.

    Args:
        key: what needs them.
        other: the value of that key that does without.

    Raises:
        ConfigError: when one is missing.
    """
    missing = int(torch.isnan(batch.engine_n).sum())
    if missing:
        raise ConfigError(
            f"{key} needs a logprob for every sampled id; {missing} of {batch.size} have none: set it to {other!r}"
        )


def check_finite(loss: float, norm: float, where: str) -> None:
    """See that an update would not destroy the weights.

    Raises:
        TurnwiseError: when the loss or its gradient is not finite.
    """
    if not math.isfinite(norm) or not math.isfinite(loss):
        raise TurnwiseError(
            f"in {where} the loss is {loss} and its gradient's norm {norm}; the weights were left as they are: lower the "
            "learning rate, and look for extreme rewards or logprobs in this step's trajectories"
        )


def _where(batch: TrainingBatch, token: int) -> str:
    key = batch.trajectories[int(batch.trajectory_n[token])].key
    return f"task {key.task!r}, sample {key.sample}, step {key.step}"


_REMEDY = {
    "template": "put the chat template back as it was (model.template, model.template_args, or the model directory's own)",
    "tokenizer": "put the tokenizer back as it was (tokenizer.json of the model directory)",
    "settings": "put the settings back as they were (stop ids of generation_config.json; another version of Turnwise may have "
    "other ones)",
}


def check_run_template(run: RunDir, renderer: ChatRenderer, *, resumed: bool) -> None:
    """Write the hashes of a run's template, tokenizer and settings into its `config.json`, or hold a resumed run to them.

    Raises:
        ConfigError: when the run goes on with others; the message says which, and what to do.
        TraceError: when `config.json` cannot be read or written.
    """
    now = {"hash": renderer.fingerprint, "origin": renderer.template.origin, **renderer.fingerprints}
    path = run.path / "config.json"
    try:
        row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read ({error}); restore it or start anew") from error
    was = row.get("template")
    if not resumed or not isinstance(was, dict):  # a run that was stopped before it began has none yet
        run.write_json("config.json", row | {"template": now})
        return
    if was.get("hash") == now["hash"]:
        return
    changed = [name for name in _REMEDY if was.get(name) != now[name]]
    raise ConfigError(
        f"--resume {run.path}: the run was begun with another {_listed(changed) or 'renderer'} "
        f"(hash {was.get('hash')}, now {now['hash']}): its episodes would not be those that this one samples; "
        f"{'; '.join(_REMEDY[name] for name in changed) or 'use the version of Turnwise that began it'}, or start a new run"
    )


def check_fingerprints(fingerprint: str, trajectories: Iterable[Trajectory], where: str) -> None:
    """Refuse trajectories whose ids come from another template, tokenizer or settings than a fingerprint's.

    Raises:
        UsageError: for the first of them.
    """
    for trajectory in trajectories:
        if trajectory.template and trajectory.template != fingerprint:
            key = trajectory.key
            name = f"{key.phase}/{key.step}/{key.task}/{key.sample}"
            raise UsageError(
                f"{where} holds an episode ({name}) of another chat template, tokenizer or settings (hash "
                f"{trajectory.template}, here {fingerprint}), whose ids mean something else to this model: leave it out, or "
                "train with what it was sampled with"
            )


def _listed(names: list[str]) -> str:
    return " and ".join(["chat template" if name == "template" else name for name in names])


TRAJECTORIES, PLACES = 4, 4
"""Looked at: trajectories of a step, and places in each."""
NEAR = (0.5, 1.5)
"""The share that is missing, about the whole."""
LEAST, MOST_PLACES = 12, 0.8
"""An engine is told apart by no fewer places than these, where at this share of them about the whole update is missing."""


@dataclass(slots=True)
class WeightSyncProbe:
    """What an update changed at K places."""

    contexts: list[list[int]]
    micros: list[MicroBatch]
    before_kv: Tensor
    """Log-probabilities, on the CPU."""
    after_kv: Tensor | None = None

    @classmethod
    def before(
        cls, credits: Sequence[Credit], score: Callable[[MicroBatch], Tensor], device: torch.device
    ) -> WeightSyncProbe | None:
        """Note the distribution before an update; None where there is nothing to look at (no text that is trained).

        Args:
            score: the log-probabilities (M, vocabulary) at the targets of a pass.
        """
        able = [c for c in credits if c.reason is None and c.tokens and not any(s.media for s in c.trajectory.spans)]
        chosen = able[:: max(1, len(able) // TRAJECTORIES)][:TRAJECTORIES]
        rows = [_thinned(rows_of(credit.trajectory, 0, credit.weights)[0]) for credit in chosen]
        if not rows:
            return None
        micros = padded(rows, max(len(row.ids) for row in rows) * len(rows), device)
        contexts = [row.ids[:place] for row in rows for place in row.places]
        return cls(contexts, micros, _scored(micros, score, len(contexts)))

    def after(self, score: Callable[[MicroBatch], Tensor]) -> WeightSyncProbe:
        """Note the distribution after the update."""
        self.after_kv = _scored(self.micros, score, len(self.contexts))
        return self

    async def ask(self, engine: Engine, version: int, banned_ids: Collection[int], seconds: float) -> None:
        """See that the engine has the update.

        Raises:
            SyncError: when it lacks a part of it.
            EngineError: when it does not answer.
        """
        requests = [
            Request(
                context,
                1,
                frozenset(),
                seed=0,
                session=f"probe/{version}/{number}",
                sampling=Sampling(temperature=0.0),
                banned_ids=frozenset(banned_ids),
                min_version=version,
            )
            for number, context in enumerate(self.contexts)
        ]
        try:
            asked = asyncio.gather(*(engine.generate(request) for request in requests))
            replies: list[Generation] = await asyncio.wait_for(asked, seconds)
        finally:
            for request in requests:
                engine.release(request.session)
        assert self.after_kv is not None
        found = []
        for number, reply in enumerate(replies):
            said = reply.logprobs[0] if reply.ids else None
            if said is not None:
                after = float(self.after_kv[number, reply.ids[0]])
                found.append((said - after, float(self.before_kv[number, reply.ids[0]]) - after))
        lost, places = count_missing(found)
        if places >= LEAST and lost >= MOST_PLACES * places:
            gap, moved = (_mean(pair[side] for pair in found) for side in (0, 1))
            raise SyncError(
                f"the engine says that it has policy {version}, but at {lost} of {places} places of the last step's "
                f"trajectories its logprobs lack what the last update changed: |logprob of engine - of trainer| is {gap:.3g} "
                f"on average, and the update moved them by {moved:.3g}. It has the weights of before, or none of a LoRA "
                "that it was sent: look at how it takes weights; nothing was trained on its episodes"
            )


def count_missing(found: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """At how many places an engine lacks about the whole update, and at how many it changed anything.

    Args:
        found: (engine - after, before - after) per place, in nats.
    """
    shares = [d / s for d, s in found if s and math.isfinite(d) and math.isfinite(s)]
    return sum(NEAR[0] < share < NEAR[1] for share in shares), len(shares)


def _mean(values: Iterable[float]) -> float:
    sizes = [abs(value) for value in values]
    return sum(sizes) / max(len(sizes), 1)


def _scored(micros: Sequence[MicroBatch], score: Callable[[MicroBatch], Tensor], places: int) -> Tensor:
    parts = [(micro.tokens_m.cpu(), score(micro).cpu()) for micro in micros]
    found = parts[0][1].new_empty((places, parts[0][1].shape[-1]))
    for tokens_m, logp_mv in parts:
        found[tokens_m] = logp_mv
    return found


def _thinned(row: TrainingRow) -> TrainingRow:
    """A row with a few of its places, spread over it."""
    kept = range(0, len(row.places), max(1, len(row.places) // PLACES))[:PLACES]
    places = [row.places[k] for k in kept]
    return TrainingRow(
        ids=row.ids[: places[-1]],
        places=places,
        targets=[row.targets[k] for k in kept],
        weights=[row.weights[k] for k in kept],
        logprobs=[row.logprobs[k] for k in kept],
        trajectory=0,
    )
